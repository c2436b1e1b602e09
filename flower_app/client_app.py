"""The Flower client: one node is one control unit. It hands each message to the control unit's actor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from torch import Tensor

from client_pipeline.link.stream import LinkCertificates
from client_pipeline.partition.families import num_blocks_of
from client_pipeline.partition.plan import ClusterPlan, read_plans, uniform_plan
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.actors import start_control_unit, train_round
from client_pipeline.runtime.control_unit import ClusterData, ClusterSetup, RoundOrder
from flower_app.client_mods import chosen_mods
from flower_app.config import RunConfig
from flower_app.run_directory import CLUSTERS
from flower_app.tasks.base import task
from flower_app.training_network import training_scenario
from strategies.clusters import ClusterState
from strategies.records import ARRAYS, CONFIG, read_train_config, reply_content, to_tensors

STATE = "collapipe"
"""Record of this app in a node's state."""

app = ClientApp()


@app.query("setup")
def setup(message: Message, context: Context) -> Message:
    """Start the control unit with its data; answer with what the planner must know of the cluster."""
    record = message.content.config_records[CONFIG]
    try:
        told = {key: cast(Any, value) for key, value in record.items()}
        frozen = to_tensors(message.content.array_records[ARRAYS])
        answer = _setup(context, told, frozen, message.metadata.dst_node_id)
    except (ValueError, FileNotFoundError) as error:
        # The user's mistake: an answer of its own, because Flower would give the server a traceback.
        answer = {"error": str(error)}
    return Message(RecordDict({CONFIG: ConfigRecord({"json": json.dumps(answer)})}), reply_to=message)


def _setup(context: Context, told: Mapping[str, Any], frozen: Mapping[str, Tensor], node_id: int) -> dict[str, Any]:
    config = RunConfig.from_flat(context.run_config)
    cluster, num_clusters = cluster_index(context), int(told["num-clusters"])
    if cluster >= num_clusters:
        return {"unused": cluster}
    spec = ModelSpec.from_json(told["spec"])
    state = _state(config, cluster, node_id, spec)
    described = start_control_unit(
        ClusterSetup(
            run=str(context.run_id),
            cluster=cluster,
            spec=spec,
            optimizer=config.optimizer,
            runtime=config.runtime,
            seed=config.seed,
            batch_size=config.batch_size,
            local_steps=config.local_steps,
            gradient_accumulation=config.gradient_accumulation,
            load_data=partial(load_cluster_data, dict(context.run_config), told["tokenizer"], cluster, num_clusters),
            compression=config.compression,
            privacy=config.privacy,
            frozen=frozen,
            certificates=_certificates(context),
            checkpoints=checkpoint_folder(config, context, str(told["run-name"]), cluster),
            checkpoint_every=max(config.checkpoint_every, 1),
            resume_round=int(told["resume-round"]),
        )
    )
    state.num_examples = described["num_examples"]
    # Flower keeps a node's state between messages: a round's plan is checked with it.
    context.state[STATE] = ConfigRecord({"spec": told["spec"]})
    return {"state": state.to_dict(), "truncated": described["truncated"]}


def checkpoint_folder(config: RunConfig, context: Context, run_name: str, cluster: int) -> Path | None:
    """Where a control unit keeps its part of the checkpoints; None: it keeps none.

    In the run directory where server and node share a machine: the configuration names it, or Flower simulates. Else
    below the node's ``state-dir`` (``~/.collapipe`` by default): on an edge box the server's folders are not there.

    Raises
    ------
    ValueError
        If the server names a run by something that is no plain name: it becomes part of a path here.
    """
    if not config.checkpoint_every:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", run_name):
        raise ValueError(f"set-up: expected a run's plain name, found {run_name!r}")
    own = context.node_config.get("state-dir", "")
    simulated = "num-partitions" in context.node_config
    if not own and (config.run_dir or simulated):
        run_dir = Path(config.run_dir) if config.run_dir else Path(config.runs_dir).expanduser() / run_name
        return run_dir.resolve() / CLUSTERS / f"cluster-{cluster}"
    return Path(str(own) or "~/.collapipe").expanduser() / run_name / f"cluster-{cluster}"


def load_cluster_data(flat: dict[str, Any], tokenizer_json: str, cluster: int, num_clusters: int) -> ClusterData:
    """Load one cluster's training examples; runs in the control unit's process."""
    config = RunConfig.from_flat(flat)
    return task(config.task).cluster_data(config.data, tokenizer_json, cluster, num_clusters, config.seed)


@app.train(mods=[chosen_mods])
def train(message: Message, context: Context) -> Message:
    """Train one round on the cluster's devices; a failure is answered as an error with its reason."""
    try:
        return _train(message, context)
    except Exception as error:
        # Left to itself Flower answers with a traceback, or in deployment with no reason at all.
        log(ERROR, "round failed", exc_info=error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{error}"), reply_to=message)


def _train(message: Message, context: Context) -> Message:
    config = RunConfig.from_flat(context.run_config)
    cluster = cluster_index(context)
    order = read_train_config(message.content.config_records[CONFIG])
    spec = ModelSpec.from_json(cast(str, context.state.config_records[STATE]["spec"]))
    state, num_blocks = _state(config, cluster, message.metadata.dst_node_id, spec), num_blocks_of(spec)
    # A stock strategy plans nothing: the control unit plans for itself.
    plan = order.plan or own_plan(config, state, num_blocks)
    plan.check(
        num_blocks=num_blocks,
        batch_size=config.batch_size,
        num_devices=len(state.devices),
        memory=None if "C7" in order.waived else state.memories,
        block_memory=state.block_memory,
        where=f"round {order.round}: plan of cluster {cluster}",
    )
    result = train_round(
        str(context.run_id),
        cluster,
        RoundOrder(
            round=order.round,
            weights=to_tensors(message.content.array_records[ARRAYS]),
            plan=plan,
            decoder=order.decoder,
            pace=order.pace,
        ),
        config.runtime.timeout,
    )
    # What the server must know to plan the next round comes with the answer to this one.
    state.num_examples = int(result.report["num_examples"])
    content = reply_content(
        result.weights,
        weight=result.weight,
        loss=result.loss,
        steps=result.steps,
        wall_s=result.wall_s,
        report={**result.report, "state": state.to_dict()},
    )
    return Message(content, reply_to=message)


def own_plan(config: RunConfig, state: ClusterState, num_blocks: int) -> ClusterPlan:
    """Plan for one cluster alone: ``uniform``, or the plan file."""
    if not config.plan:
        return uniform_plan(
            speed=state.speeds,
            memory=state.memories,
            block_memory=state.block_memory,
            num_blocks=num_blocks,
            batch_size=config.batch_size,
        )
    plans = read_plans(Path(config.plan))
    if state.cluster >= len(plans):
        raise ValueError(
            f"{config.plan}: has plans for {len(plans)} clusters, expected one for cluster {state.cluster}"
        )
    return plans[state.cluster]


def cluster_index(context: Context) -> int:
    """Index of the cluster that this node is.

    Raises
    ------
    ValueError
        If the node has no ``partition-id``.
    """
    index = context.node_config.get("partition-id")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ValueError(
            f"node config: partition-id: expected the cluster's index from 0, found {index!r}; start the SuperNode "
            'with --node-config "partition-id=0"'
        )
    return index


def _state(config: RunConfig, cluster: int, node_id: int, spec: ModelSpec) -> ClusterState:
    scenario = training_scenario(config, spec)
    if cluster >= scenario.num_clusters:
        raise ValueError(
            f"scenario {config.scenario}: has {scenario.num_clusters} clusters, none for the node with "
            f"partition-id {cluster}; use a scenario with more clusters or fewer nodes"
        )
    return ClusterState(
        cluster=cluster,
        node_id=node_id,
        devices=scenario.clusters[cluster],
        block_memory=scenario.block_memory,
        num_examples=0,
    )


def _certificates(context: Context) -> LinkCertificates:
    given = {name: str(context.node_config.get(f"tls-{name}", "")) for name in ("certificate", "key", "ca")}
    return LinkCertificates(certificate=given["certificate"], key=given["key"], root_certificate=given["ca"])
