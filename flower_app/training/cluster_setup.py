"""Set-up before round 1: wait for the nodes, send each the run's set-up, read the answers about the clusters."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from types import MappingProxyType
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from client_pipeline.counted import counted
from flower_app.config.run_config import RunConfig
from flower_app.runs.machines import ClusterMachines
from flower_app.training.network import pool_size, training_scenario
from flower_app.training.releases import most_examples
from strategies.clusters import ClusterState, check_clusters
from strategies.flower_internals import InMemoryGrid
from strategies.flower_names import log
from strategies.grid.forwarding import innermost
from strategies.grid.intake import RoundBounds
from strategies.grid.received_report import checked_setup
from strategies.grid.received_values import MalformedReply
from strategies.grid.reply_matching import error_reason, match_replies
from strategies.grid.update_spool import message_bytes
from strategies.printable import printable
from strategies.records import ARRAYS, CONFIG, PULL_KEY, SETUP, to_arrays

SETUP_TIMEOUT_S = 3600.0
"""Time for a control unit to load and encode its data [s]."""
_MISTAKE_CHARACTERS = 2000
"""Longest message of a node about its user's mistake that is shown."""
_FLWR_RUN = (
    'flwr run . --stream --federation-config "num-supernodes={0} client-resources-num-cpus=1 init-args-num-cpus={0}"'
)
_SETTLED_S = 5.0
"""A simulation makes all of its nodes within moments: no more come after so long [s]."""


class Clusters(NamedTuple):
    """Clusters of a run, and the bytes of their set-up."""

    states: list[ClusterState]
    """In the order of their numbers."""
    bytes_down: int
    """Tensors that went down: frozen weights, once for each process of the run."""
    at_once: int
    """Client apps that run at the same time: all, but for a simulation with less room."""
    machines: Mapping[int, ClusterMachines] = MappingProxyType({})
    """Machines of each cluster that named them."""


def set_up_clusters(
    grid: Grid,
    nodes: Sequence[int],
    setup_values: Mapping[str, str | int],
    sent: Mapping[str, Tensor],
    num_clusters: int,
    max_length: int,
    trained: Collection[int] = (),
    pulls: Mapping[int, str] = MappingProxyType({}),
) -> Clusters:
    """Send every node the set-up, and return the clusters. A mistake that any node finds ends the run here.

    Parameters
    ----------
    grid : Flower's
    nodes : ids of the connected nodes
    setup_values : values that each receives
    sent : weights that are never trained, by global name, where the nodes do not have them in files
    num_clusters : N
    max_length : at which sequences are cut [tokens], for the log
    trained : clusters that have trained in the run before it was continued
    pulls : by node: where it may pull files of weights that it lacks

    Raises
    ------
    RuntimeError
        If a node does not answer in time, or fails.
    ValueError
        If a node finds a mistake in the configuration or its data, or the clusters are not 0 .. N - 1.
    """
    # Frozen weights go down here, and never with a round.
    arrays = to_arrays(sent)
    messages = []
    for node in nodes:
        record = ConfigRecord({**setup_values, PULL_KEY: pulls.get(node, "")})
        content = RecordDict({CONFIG: record, ARRAYS: arrays})
        messages.append(Message(content, dst_node_id=node, message_type=SETUP))
    answers = match_replies(messages, grid.send_and_receive(messages, timeout=SETUP_TIMEOUT_S))
    if silent := sorted(node for node, reply in zip(nodes, answers, strict=True) if reply is None):
        raise RuntimeError(f"set-up: no answer from nodes {silent} within {SETUP_TIMEOUT_S:g} s")
    is_simulation = isinstance(innermost(grid), InMemoryGrid)
    states, machines = [], {}
    at_once = min(num_clusters, pool_size()) if is_simulation else num_clusters
    for node, reply in zip(nodes, answers, strict=True):
        assert reply is not None
        if reply.has_error():
            raise RuntimeError(f"set-up: node {node}: {printable(error_reason(reply))}")
        try:
            answer = checked_setup(reply.content, node, num_clusters)
        except MalformedReply as error:
            raise RuntimeError(f"set-up: node {node}: its answer cannot be read: {printable(str(error))}") from error
        if "error" in answer:
            raise ValueError(printable(answer["error"], _MISTAKE_CHARACTERS))
        if "state" in answer:
            state = ClusterState.from_dict(answer["state"])
            states.append(state)
            if "machine" in answer:
                machines[state.cluster] = ClusterMachines(answer["machine"], answer.get("device-machines", {}))
            if is_simulation:
                at_once = min(at_once, answer.get("at-once") or num_clusters)
            cluster_name = f"cluster {state.cluster}"
            if state.cluster in trained and not answer["restored"]:
                log(
                    WARNING,
                    "%s has no checkpoint of its own left: it goes on from the global model with a fresh optimizer, at "
                    "the start of its data; the continued run is not the one without a break",
                    cluster_name,
                )
            if cut := answer["truncated"]:
                log(
                    WARNING, "%s: %d training sequences were cut at data.max-length = %d", cluster_name, cut, max_length
                )
    check_clusters(states, num_clusters)
    states.sort(key=lambda state: state.cluster)
    total = sum(state.num_examples for state in states)
    for state in states:
        share = 100 * state.num_examples / total
        log(INFO, "cluster %d trains on %d examples, %.1f%%", state.cluster, state.num_examples, share)
    return Clusters(states, sum(map(message_bytes, messages)), at_once, machines)


def round_bounds(config: RunConfig, num_blocks: int, clusters: Sequence[ClusterState]) -> RoundBounds:
    """Return the bounds of every honest answer to a training order, from the run's configuration."""
    return RoundBounds(
        steps=config.local_steps,
        # A sequence is cut at data.max-length, its marks and all.
        max_weight=float(most_examples(config) * config.data.max_length),
        num_blocks=num_blocks,
        batch_size=config.batch_size,
        num_devices={state.cluster: len(state.devices) for state in clusters},
    )


def fitted_to_nodes(config: RunConfig, grid: Grid) -> RunConfig:
    """Limit the clusters to the nodes of a simulation, unless the configuration names a number, and log it.

    Plain ``flwr run`` gives two nodes by default, whatever the scenario has.
    """
    if config.num_clusters or not isinstance(innermost(grid), InMemoryGrid):
        return config
    num_clusters = training_scenario(config).num_clusters
    num_nodes = len(_settled_nodes(grid, num_clusters, _SETTLED_S))
    if not 0 < num_nodes < num_clusters:
        return config
    log(
        WARNING,
        "scenario %s has %d clusters, this simulation %d nodes: only the first %d clusters train; all of them: %s",
        config.scenario,
        num_clusters,
        num_nodes,
        num_nodes,
        _FLWR_RUN.format(num_clusters),
    )
    return replace(config, num_clusters=num_nodes)


def nodes_there(grid: Grid, num_wanted: int) -> list[int]:
    """Wait until so many nodes are connected, or no more come; returns those that are."""
    return _settled_nodes(grid, num_wanted, _SETTLED_S)


def wait_for_nodes(grid: Grid, num_needed: int, timeout_s: float) -> list[int]:
    """Wait, with a bound, until ``num_needed`` nodes are connected; returns all that are.

    Raises
    ------
    ValueError
        If they do not come in time, or can come no more; the message says how many came, and what brings the others.
    """
    simulated = isinstance(innermost(grid), InMemoryGrid)
    nodes = _settled_nodes(grid, num_needed, _SETTLED_S if simulated else math.inf, timeout_s)
    if len(nodes) >= num_needed:
        return nodes
    shortage = f"num-clusters: expected {counted(num_needed, 'node')}, one a cluster, found {len(nodes)}"
    if simulated:
        raise ValueError(
            f"{shortage}; simulate as many: {_FLWR_RUN.format(num_needed)}, "
            f"or train {counted(len(nodes), 'cluster')} alone with --run-config num-clusters={len(nodes)}"
        )
    raise ValueError(f"{shortage} within {timeout_s:g} s; start more nodes or lower num-clusters")


def _settled_nodes(grid: Grid, num_needed: int, settled_s: float, timeout_s: float = 60.0) -> list[int]:
    """Wait until enough nodes are there, no more have come for ``settled_s``, or the time is over; returns all."""
    start = changed = time.monotonic()
    nodes: list[int] = []
    while True:
        previous_nodes, nodes = nodes, sorted(grid.get_node_ids())
        now = time.monotonic()
        changed = changed if len(nodes) == len(previous_nodes) else now
        # Nodes of a simulation register one after the other: take those that are there when no more come.
        if len(nodes) >= num_needed and len(nodes) == len(previous_nodes):
            return nodes
        if now > start + timeout_s or (nodes and now > changed + settled_s):
            return nodes
        time.sleep(0.5)
