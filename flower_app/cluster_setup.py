"""Before round 1: wait for the nodes, tell each about the run, learn what its cluster has."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from logging import INFO, WARNING
from typing import NamedTuple, cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from strategies.clusters import ClusterState, check_clusters
from strategies.recording_grid import array_bytes
from strategies.records import ARRAYS, CONFIG, SETUP, to_arrays

SETUP_TIMEOUT_S = 3600.0
"""How long a control unit may take to load and encode its data."""


class Clusters(NamedTuple):
    """The run's clusters, and what telling them cost."""

    states: list[ClusterState]
    """In the order of their numbers."""
    bytes_down: int
    """Tensors that went down: frozen weights, once for each process of the run."""


def set_up_clusters(
    grid: Grid,
    nodes: Sequence[int],
    told: Mapping[str, str | int],
    frozen: Mapping[str, Tensor],
    num_clusters: int,
    max_length: int,
    trained: Collection[int] = (),
) -> Clusters:
    """Tell every node about the run; learn the clusters. A mistake that any node finds ends the run here.

    Parameters
    ----------
    grid : Flower's
    nodes : ids of the connected nodes
    told : what each is told
    frozen : weights that are never trained, by global name
    num_clusters : N
    max_length : at which sequences are cut [tokens], for the log
    trained : clusters that have trained in the run before it was continued

    Raises
    ------
    RuntimeError
        If a node does not answer in time, or fails.
    ValueError
        If a node finds a mistake in the configuration or its data, or the clusters are not 0 .. N - 1.
    """
    # Frozen weights go down here, and never with a round.
    record, arrays = ConfigRecord(dict(told)), to_arrays(frozen)
    messages = [
        Message(RecordDict({CONFIG: record, ARRAYS: arrays}), dst_node_id=node, message_type=SETUP) for node in nodes
    ]
    replies = list(grid.send_and_receive(messages, timeout=SETUP_TIMEOUT_S))
    if silent := sorted(set(nodes) - {reply.metadata.src_node_id for reply in replies}):
        raise RuntimeError(f"set-up: no answer from nodes {silent} within {SETUP_TIMEOUT_S:g} s")
    states = []
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RuntimeError(f"set-up: node {node}: {reply.error.reason}")
        answer = json.loads(cast(str, reply.content.config_records[CONFIG]["json"]))
        if "error" in answer:
            raise ValueError(answer["error"])
        if "state" in answer:
            state = ClusterState.from_dict(answer["state"])
            states.append(state)
            where = f"cluster {state.cluster}"
            if state.cluster in trained and not answer["restored"]:
                log(
                    WARNING,
                    "%s has no checkpoint of its own left: it goes on from the global model with a fresh optimizer, at "
                    "the start of its data; the continued run is not the one without a break",
                    where,
                )
            if cut := answer["truncated"]:
                log(WARNING, "%s: %d training sequences were cut at data.max-length = %d", where, cut, max_length)
    check_clusters(states, num_clusters)
    states.sort(key=lambda state: state.cluster)
    total = sum(state.num_examples for state in states)
    for state in states:
        share = 100 * state.num_examples / total
        log(INFO, "cluster %d trains on %d examples, %.1f%%", state.cluster, state.num_examples, share)
    return Clusters(states, sum(map(array_bytes, messages)))


def wait_for_nodes(grid: Grid, needed: int, timeout_s: float) -> list[int]:
    """Wait, with a bound, until ``needed`` nodes are connected; returns all that are.

    Raises
    ------
    ValueError
        If they do not come in time; the message says how many came.
    """
    deadline = time.monotonic() + timeout_s
    nodes: list[int] = []
    while True:
        before, nodes = nodes, sorted(grid.get_node_ids())
        # Nodes of a simulation register one after the other: take those that are there when no more come.
        if len(nodes) >= needed and len(nodes) == len(before):
            return nodes
        if time.monotonic() > deadline:
            raise ValueError(
                f"num-clusters: {needed} nodes are needed, {len(nodes)} came within {timeout_s:g} s; start more nodes "
                "or lower num-clusters"
            )
        time.sleep(0.5)
