"""The Flower client: one node is one control unit. It hands each message to the control unit's actor.

A simulation has as many of these processes as clusters that train at once: nothing here imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from client_pipeline.link.address import DecoderAddress
from client_pipeline.partition.spec import ModelSpec, is_outside
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime import fault_files
from client_pipeline.runtime.actors import (
    ControlUnitAbsent,
    ControlUnitError,
    ControlUnitLost,
    restart_control_unit,
    start_control_unit,
    train_round,
    workers_at_once,
)
from client_pipeline.runtime.arrangement import Arrangement
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.runtime.machine import machine_facts
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.round_order import ClusterSetup, RoundOrder, RoundResult
from flower_app.config.run_config import RunConfig
from flower_app.error_text import error_text
from flower_app.node import kept_setup
from flower_app.node.client_mods import chosen_mods, packed_mod
from flower_app.node.config import NodeConfig
from flower_app.node.own_plans import own_plan, replan_of_node
from flower_app.node.round_notes import noted_round
from flower_app.node.simulated_clients import let_all_clients_run
from flower_app.runs.run_directory import CLUSTERS, RUN_NAME
from flower_app.runs.run_inputs import data_digest
from flower_app.training.cluster_data import load_cluster_data
from strategies.clusters import ClusterState
from strategies.flower_internals import ErrorCode, log
from strategies.grid.parcels import unpack_message
from strategies.records import (
    ARRAYS,
    BASE_KEY,
    CONFIG,
    PULL_KEY,
    TrainOrder,
    failure_reason,
    read_train_config,
    reply_content,
    to_numpy,
)

STATE = "collapipe"
"""Record of this app in a node's state."""
_STATE_DIR = "~/.collapipe"
"""Folder of a node that names none."""

let_all_clients_run()
app = ClientApp()


@app.query("setup")
def answer_setup(message: Message, context: Context) -> Message:
    """Start the control unit with its data; answer with what the planner must know of the cluster."""
    try:
        unpack_message(message)
        record = message.content.config_records[CONFIG]
        setup_values = {key: cast(Any, value) for key, value in record.items()}
        sent = to_numpy(message.content.array_records[ARRAYS])
        answer = _setup(context, setup_values, sent, message.metadata.dst_node_id)
    except (ValueError, FileNotFoundError) as error:
        # The user's mistake: an answer of its own, because Flower would give the server a traceback.
        answer = {"error": str(error)}
    return Message(RecordDict({CONFIG: ConfigRecord({"json": json.dumps(answer)})}), reply_to=message)


def _read(context: Context) -> tuple[RunConfig, NodeConfig]:
    """The run's configuration and the node's, whose owner allows the classes that the run names."""
    node = NodeConfig.read(context.node_config)
    node.check_classes(context.run_config)
    return RunConfig.as_sent(context.run_config), node


def _spec(text: str, config: RunConfig) -> ModelSpec:
    """The model's specification; a class that it names is the configuration's, which has been looked at.

    Raises
    ------
    ValueError
        If it is another one.
    """
    spec = ModelSpec.from_json(text)
    if is_outside(spec.family) and spec.family != config.model.family:
        raise ValueError(
            f"set-up: expected a model of model.family = {config.model.family}, found one of {spec.family}"
        )
    return spec


def _setup(
    context: Context, setup_values: Mapping[str, Any], sent: Mapping[str, NDArray[Any]], node_id: int
) -> dict[str, Any]:
    config, node = _read(context)
    cluster, num_clusters = node.cluster, int(setup_values["num-clusters"])
    if cluster >= num_clusters:
        return {"unused": cluster}
    declared = ClusterState.from_dict(json.loads(setup_values["network"])[cluster])
    state = replace(declared, node_id=node_id, devices=node.devices(declared.devices))
    folder = node_folder(config, node, str(setup_values["run-name"]))
    described = start_control_unit(_cluster_setup(context, node, setup_values, sent, folder, len(state.devices)))
    # Not before: a control unit that another run needs would start again with it.
    kept_values = {**setup_values, "num-blocks": described["num_blocks"]}
    # Worth nothing from round 1 on; what was pulled with it is in the node's cache.
    kept_values.pop(PULL_KEY, None)
    kept_setup.write(folder, kept_values, sent)
    state = replace(state, num_examples=described["num_examples"])
    _keep(context, kept_values, state, folder)
    return {
        "state": state.to_dict(),
        "truncated": described["truncated"],
        "restored": described["restored"],
        "at-once": workers_at_once() if node.simulated else 0,
        "machine": machine_facts(),
        "device-machines": described["machines"],
    }


def _keep(context: Context, setup_values: Mapping[str, Any], state: ClusterState, folder: Path) -> ConfigRecord:
    """Note what rounds need of the set-up.

    Flower keeps a node's state between messages: a round's plan is made and checked with it, and a control unit that is
    lost starts again from what its folder holds.
    """
    entries = {
        "spec": setup_values["spec"],
        "num-blocks": int(setup_values["num-blocks"]),
        "plans": setup_values["plans"],
        "device-actors": setup_values.get("device-actors", 0),
        "cluster-actors": setup_values.get("cluster-actors", 0),
        "cluster": json.dumps(state.to_dict()),
        "folder": str(folder),
    }
    context.state[STATE] = record = ConfigRecord(entries)
    return record


def _setup_record(context: Context, config: RunConfig, node: NodeConfig, run_name: str) -> ConfigRecord:
    """What rounds need of the set-up; a SuperNode that was started again reads it from the node's folder.

    Raises
    ------
    RuntimeError
        If this node has never been set up for the run.
    """
    if STATE in context.state:
        return context.state.config_records[STATE]
    if not run_name:
        raise RuntimeError(f"cluster {node.cluster}: its node was started again and does not know its run")
    folder = node_folder(config, node, run_name)
    try:
        setup_values, _ = kept_setup.read(folder)
    except FileNotFoundError as error:
        raise RuntimeError(f"cluster {node.cluster}: its node was started again without its --state: {error}") from None
    log(
        WARNING, "cluster %d: its SuperNode was started again; it continues with the set-up in %s", node.cluster, folder
    )
    declared = ClusterState.from_dict(json.loads(setup_values["network"])[node.cluster])
    state = replace(declared, node_id=context.node_id, devices=node.devices(declared.devices))
    return _keep(context, setup_values, state, folder)


def _cluster_setup(
    context: Context,
    node: NodeConfig,
    setup_values: Mapping[str, Any],
    sent: Mapping[str, NDArray[Any]],
    folder: Path,
    num_devices: int,
) -> ClusterSetup:
    config, num_clusters = RunConfig.as_sent(context.run_config), int(setup_values["num-clusters"])
    flat_config = node.run_config(context.run_config)
    return ClusterSetup(
        run=str(context.run_id),
        cluster=node.cluster,
        spec=_spec(setup_values["spec"], config).of_cluster(node.cluster),
        optimizer=config.optimizer,
        runtime=config.runtime,
        seed=config.seed,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        gradient_accumulation=config.gradient_accumulation,
        load_data=partial(
            load_cluster_data,
            flat_config,
            setup_values["tokenizer"],
            node.cluster,
            num_clusters,
            tuple(json.loads(str(setup_values.get("data-shares", "[]")))),
        ),
        compression=config.compression,
        privacy=config.privacy,
        frozen=sent,
        base=str(setup_values.get(BASE_KEY, "")),
        base_source=node.model_path,
        weight_cache=Path(node.state_dir or _STATE_DIR).expanduser() / "weights",
        pull_from=_pull_address(str(setup_values.get(PULL_KEY, ""))),
        certificates=node.certificates,
        checkpoints=folder if config.checkpoint_every else None,
        folder=folder,
        lost_at=setup_values.get("lost-at"),
        checkpoint_every=max(config.checkpoint_every, 1),
        resume_round=int(setup_values["resume-round"]),
        identity=RunIdentity(str(setup_values.get("run-identity", "")), str(setup_values.get("config-identity", ""))),
        data=data_digest(RunConfig.as_sent(flat_config).data, node.cluster),
        placement=_limited(_placement(node, num_devices, setup_values), config, node, setup_values),
        faults=config.faults,
    )


def node_folder(config: RunConfig, node: NodeConfig, run_name: str) -> Path:
    """Where a node keeps its control unit's set-up and its part of the checkpoints.

    In the run directory where server and node share a machine: the configuration names it, or Flower simulates. Else
    below the node's ``state-dir`` (``~/.collapipe`` by default): on an edge box the server's folders are not there.

    Raises
    ------
    ValueError
        If the server names a run by something that is no plain name: it becomes part of a path here.
    """
    if not RUN_NAME.fullmatch(run_name):
        raise ValueError(f"set-up: expected a run's plain name, found {run_name!r}")
    cluster_name = f"cluster-{node.cluster}"
    if not node.state_dir and (config.run_dir or node.simulated):
        run_dir = Path(config.run_dir) if config.run_dir else Path(config.runs_dir).expanduser() / run_name
        return run_dir.resolve() / CLUSTERS / cluster_name
    return Path(node.state_dir or _STATE_DIR).expanduser() / run_name / cluster_name


def _pull_address(text: str) -> DecoderAddress | None:
    return DecoderAddress.from_dict(json.loads(text)) if text else None


@app.train()
def answer_training(message: Message, context: Context) -> Message:
    """Train one round on the cluster's devices; a failure is answered as an error with its reason.

    The mods are called here, not named to Flower: whoever calls this function has them, too.
    """
    try:
        return packed_mod(message, context, partial(chosen_mods, call_next=_train))
    except Exception as error:
        # Left to itself Flower answers with a traceback, or in deployment with no reason at all.
        log(ERROR, "round failed", exc_info=error)
        reason = failure_reason(error_text(error), error.faults if isinstance(error, ControlUnitError) else ())
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _train(message: Message, context: Context) -> Message:
    config, node = _read(context)
    order = read_train_config(message.content.config_records[CONFIG])
    setup_record = _setup_record(context, config, node, order.run)
    spec = _spec(cast(str, setup_record["spec"]), config)
    num_blocks = cast(int, setup_record["num-blocks"])
    state = ClusterState.from_dict(json.loads(cast(str, setup_record["cluster"])))
    # A stock strategy plans nothing: the control unit plans for itself.
    plan = order.plan or own_plan(cast(str, setup_record["plans"]), state, config, num_blocks)
    plan.check(
        num_blocks=num_blocks,
        batch_size=config.batch_size,
        num_devices=len(state.devices),
        # The server knows what its plan's schedule keeps of activations; gamma_0 counts a whole batch's.
        memory=state.memories if order.plan is None else None,
        block_memory=state.block_memory,
        location=f"round {order.round}: plan of cluster {node.cluster}",
    )
    round_order = RoundOrder(
        round=order.round,
        weights=to_numpy(message.content.array_records[ARRAYS]),
        plan=plan,
        decoder=order.decoder,
        pace=order.pace,
        replan=replan_of_node(context.run_id, config, node, state, spec, num_blocks, order),
        counted=order.counted[node.cluster] if node.cluster < len(order.counted) else 0,
    )
    place = _placement(node, len(state.devices), setup_record)
    train_it = partial(train_round, str(context.run_id), node.cluster, round_order, config.runtime.timeout, place)
    start_again = partial(_start_again, context, node, len(state.devices), max(config.checkpoint_every, 1))
    folder = Path(str(setup_record["folder"]))
    # Where server and node share a machine the run directory has it all.
    notes_folder = folder if node.state_dir else None
    with noted_round(notes_folder, order.round) as notes:
        result = _trained_or_started_again(train_it, start_again, node, order, folder)
        notes |= result.report
    # What the server must know to plan the next round comes with the answer to this one.
    state = replace(state, num_examples=int(result.report["num_examples"]))
    content = reply_content(
        result.weights,
        weight=result.weight,
        loss=result.loss,
        steps=result.steps,
        wall_s=result.wall_s,
        report={**result.report, "state": state.to_dict()},
    )
    return Message(content, reply_to=message)


def _trained_or_started_again(
    train_it: Callable[[], RoundResult],
    start_again: Callable[..., None],
    node: NodeConfig,
    order: TrainOrder,
    folder: Path,
) -> RoundResult:
    """Train; a control unit that was lost before is started again, and one that is lost now for the next round."""
    try:
        try:
            return train_it()
        except ControlUnitAbsent:
            start_again(order.round - 1)
            return train_it()
    except ControlUnitLost as lost:
        if order.decoder is not None:
            # Its own process cannot say so any more, and the others wait for it.
            from client_pipeline.link.reopened_connection import give_up

            give_up(order.decoder, node.certificates, str(lost))
        faults = fault_files.recorded_faults(folder, order.round)
        if faults:
            faults = [*faults, _lost_record(node.cluster, order.round, str(lost)).to_dict()]
        if not isinstance(lost, ControlUnitAbsent):
            try:
                start_again(order.round, time.time())
            except ControlUnitAbsent as absent:
                raise ControlUnitLost(f"{lost}; {absent}", faults or lost.faults) from lost
        raise type(lost)(str(lost), faults or lost.faults) from lost


def _lost_record(cluster: int, round_: int, reason: str) -> FaultRecord:
    return FaultRecord(kind="cluster", cluster=cluster, round=round_, recovered=False, reason=reason)


def _start_again(
    context: Context, node: NodeConfig, num_devices: int, interval: int, round_: int, lost_at: float | None = None
) -> None:
    """Have a control unit that was lost go on from the newest file that it wrote, up to that of ``round_``."""
    folder = Path(str(context.state.config_records[STATE]["folder"]))
    setup_values, sent = kept_setup.read(folder)
    # Its files have the number of the round that the server commits next.
    setup_values |= {"resume-round": -(-round_ // interval) * interval, "lost-at": lost_at}
    log(WARNING, "cluster %d: starting its control unit again", node.cluster)
    restart_control_unit(_cluster_setup(context, node, setup_values, sent, folder, num_devices))


def _limited(placement: Placement, config: RunConfig, node: NodeConfig, setup_values: Mapping[str, Any]) -> Placement:
    """Have each device's own process held to what the network says of its memory, where the run asks for it."""
    if config.runtime.memory_limit == "none":
        return placement
    declared = ClusterState.from_dict(json.loads(str(setup_values["network"]))[node.cluster])
    devices = node.devices(declared.devices)
    return replace(placement, device_memory=tuple(device.memory for device in devices))


def _placement(node: NodeConfig, num_devices: int, setup_values: Mapping[str, Any]) -> Placement:
    if node.simulated:
        device_actors, cluster_actors = (int(setup_values.get(f"{kind}-actors", 0)) for kind in ("device", "cluster"))
        arrangement = Arrangement(device_actors=device_actors, cluster_actors=cluster_actors)
        return arrangement.placement(node.cluster, num_devices)
    if not node.ray_address:
        return Placement()
    return Placement(ray_address=node.ray_address, host=node.host, num_devices=num_devices)
