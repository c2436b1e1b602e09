"""Flower client app of one node, which is one control unit: it hands each message to the control unit's actor.

A simulation runs many of these processes at once: nothing here imports torch.
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
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from numpy.typing import NDArray

from client_pipeline.link.address import DecoderAddress
from client_pipeline.partition.spec import ModelSpec, is_outside
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.control_unit import fault_files
from client_pipeline.runtime.control_unit.actors import (
    ControlUnitAbsent,
    ControlUnitError,
    ControlUnitLost,
    begin_round,
    collect_round,
    restart_control_unit,
    start_control_unit,
    train_round,
    workers_at_once,
)
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, HandOver, RoundOrder, RoundResult
from client_pipeline.runtime.ray.arrangement import Arrangement
from client_pipeline.runtime.ray.machine import machine_facts
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.transport.faults import FaultRecord
from flower_app.config.run_config import RunConfig
from flower_app.error_text import error_text
from flower_app.node import kept_setup
from flower_app.node.config import NodeConfig
from flower_app.node.own_plans import own_plan, replan_of_node
from flower_app.node.round_notes import noted_round
from flower_app.node.taken_model import refuse_while_serving, take_model
from flower_app.runs.run_directory import CLUSTERS, RUN_NAME
from flower_app.runs.run_inputs import data_digest
from flower_app.training.cluster_data import load_cluster_data
from strategies.clusters import ClusterState
from strategies.flower_names import CLIENT_APP_RAISED_EXCEPTION, ClientAppCallable, Mod, log
from strategies.grid.parcels import packed_messages, unpack_message
from strategies.records import (
    ARRAYS,
    BASE_KEY,
    CONFIG,
    PULL_KEY,
    failure_reason,
    read_train_config,
    reply_content,
    to_numpy,
    under_way,
)

STATE = "collapipe"
"""Record of this app in a node's state."""
_COLLECT_S = 1.0
"""Time that a message waits for the result of a round that is under way [s]."""

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
    return _json_reply(answer, message)


@app.query("serve")
def answer_serving(message: Message, context: Context) -> Message:
    """Hand a trained model to the door of this box, or let the door close."""
    try:
        unpack_message(message)
        config, node = _read(context)
        values = json.loads(str(message.content.config_records[CONFIG]["json"]))
        answer = take_model(config, node, values, to_numpy(message.content.array_records[ARRAYS]))
    except (OSError, ValueError) as error:
        answer = {"error": str(error)}
    return _json_reply(answer, message)


def _json_reply(answer: Mapping[str, Any], message: Message) -> Message:
    return Message(RecordDict({CONFIG: ConfigRecord({"json": json.dumps(answer)})}), reply_to=message)


def _read(context: Context) -> tuple[RunConfig, NodeConfig]:
    """Return the run's configuration and the node's; refuse classes that the node's owner has not allowed."""
    node = NodeConfig.read(context.node_config)
    node.check_classes(context.run_config)
    return RunConfig.as_sent(context.run_config), node


def _spec(text: str, config: RunConfig) -> ModelSpec:
    """Return the model's specification; a class that it names must be that of the checked configuration."""
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
    refuse_while_serving(node)
    declared = ClusterState.from_dict(json.loads(setup_values["network"])[cluster])
    state = replace(declared, node_id=node_id, devices=node.devices(declared.devices))
    folder = node_folder(config, node, str(setup_values["run-name"]))
    described = start_control_unit(
        _cluster_setup(context, config, node, setup_values, sent, folder, len(state.devices))
    )
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
    """Return what rounds need of the set-up; a SuperNode that was started again reads it from the node's folder."""
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
    config: RunConfig,
    node: NodeConfig,
    setup_values: Mapping[str, Any],
    sent: Mapping[str, NDArray[Any]],
    folder: Path,
    num_devices: int,
) -> ClusterSetup:
    node_config, pull_from = node.run_config(config), str(setup_values.get(PULL_KEY, ""))
    placement = _placement(node, num_devices, setup_values)
    if config.runtime.memory_limit != "none":
        # Each device's own process is held to what the network says of its memory.
        declared = ClusterState.from_dict(json.loads(str(setup_values["network"]))[node.cluster])
        limits = tuple(device.memory for device in node.devices(declared.devices))
        placement = replace(placement, device_memory=limits)
    return ClusterSetup(
        run=str(context.run_id),
        cluster=node.cluster,
        spec=_spec(setup_values["spec"], config).of_cluster(node.cluster),
        optimizer=config.optimizer,
        runtime=replace(config.runtime, recompute="always" if config.recomputes else "never"),
        seed=config.seed,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        gradient_accumulation=config.gradient_accumulation,
        load_data=partial(
            load_cluster_data,
            node_config,
            setup_values["tokenizer"],
            node.cluster,
            int(setup_values["num-clusters"]),
            tuple(json.loads(str(setup_values.get("data-shares", "[]")))),
        ),
        compression=config.compression,
        forward_only=bool(setup_values.get("forward-only", 0)),
        privacy=config.privacy,
        frozen=sent,
        base=str(setup_values.get(BASE_KEY, "")),
        base_source=node.model_path,
        weight_cache=node.weight_cache,
        pull_from=DecoderAddress.from_dict(json.loads(pull_from)) if pull_from else None,
        certificates=node.certificates,
        checkpoints=folder if config.checkpoint_every else None,
        folder=folder,
        lost_at=setup_values.get("lost-at"),
        checkpoint_every=max(config.checkpoint_every, 1),
        resume_round=int(setup_values["resume-round"]),
        identity=RunIdentity(str(setup_values.get("run-identity", "")), str(setup_values.get("config-identity", ""))),
        data=data_digest(node_config.data, node.cluster),
        placement=placement,
        faults=config.faults,
    )


def node_folder(config: RunConfig, node: NodeConfig, run_name: str) -> Path:
    """Return the folder of a node's set-up and of its part of the checkpoints.

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
    return node.folder / run_name / cluster_name


@app.train()
def answer_training(message: Message, context: Context) -> Message:
    """Train one round on the cluster's devices; a failure is answered as an error with its reason.

    The mods are called here, not named to Flower: whoever calls this function has them, too.
    """
    try:
        return packed_mod(message, context, partial(chosen_mods, call_next=_train))
    except RoundUnderWay:
        return Message(under_way(), reply_to=message)
    except Exception as error:
        # Left to itself Flower answers with a traceback, or in deployment with no reason at all.
        log(ERROR, "round failed", exc_info=error)
        reason = failure_reason(error_text(error), error.faults if isinstance(error, ControlUnitError) else ())
        return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _train(message: Message, context: Context) -> Message:
    config, node = _read(context)
    order = read_train_config(message.content.config_records[CONFIG], node.cluster)
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
    arrays = message.content.array_records
    order = replace(
        order,
        # A message that collects a round's result has no weights.
        weights=to_numpy(arrays[ARRAYS]) if ARRAYS in arrays else {},
        plan=plan,
        replan=replan_of_node(context.run_id, config, node, state, spec, num_blocks, order),
    )
    place = _placement(node, len(state.devices), setup_record)
    train = train_round if order.hand_over is None else _train_handed_over
    train_it = partial(train, str(context.run_id), node.cluster, order, config.runtime.timeout, place)
    start_again = partial(_start_again, context, config, node, len(state.devices))
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


class RoundUnderWay(Exception):
    """The round has been begun, and its result is collected by a later message."""


def _train_handed_over(
    run: str, cluster: int, order: RoundOrder, timeout_s: float, placement: Placement
) -> RoundResult:
    """Begin a round, or collect its result; as :func:`train_round` else.

    Raises
    ------
    RoundUnderWay
        Before the round is over.
    """
    if order.hand_over is HandOver.COLLECT:
        result = collect_round(run, cluster, order.round, timeout_s, placement, _COLLECT_S)
        if result is not None:
            return result
    else:
        begin_round(run, cluster, order, timeout_s, placement)
    raise RoundUnderWay


def _trained_or_started_again(
    train_it: Callable[[], RoundResult],
    start_again: Callable[..., None],
    node: NodeConfig,
    order: RoundOrder,
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
            record = FaultRecord(
                kind="cluster", cluster=node.cluster, round=order.round, recovered=False, reason=str(lost)
            )
            faults = [*faults, record.to_dict()]
        if not isinstance(lost, ControlUnitAbsent):
            try:
                start_again(order.round, time.time())
            except ControlUnitAbsent as absent:
                raise ControlUnitLost(f"{lost}; {absent}", faults or lost.faults) from lost
        raise type(lost)(str(lost), faults or lost.faults) from lost


def _start_again(
    context: Context, config: RunConfig, node: NodeConfig, num_devices: int, round_: int, lost_at: float | None = None
) -> None:
    """Have a control unit that was lost go on from the newest file that it wrote, up to that of ``round_``."""
    folder = Path(str(context.state.config_records[STATE]["folder"]))
    setup_values, sent = kept_setup.read(folder)
    # Its files have the number of the round that the server commits next.
    interval = max(config.checkpoint_every, 1)
    setup_values |= {"resume-round": -(-round_ // interval) * interval, "lost-at": lost_at}
    log(WARNING, "cluster %d: starting its control unit again", node.cluster)
    restart_control_unit(_cluster_setup(context, config, node, setup_values, sent, folder, num_devices))


def _placement(node: NodeConfig, num_devices: int, setup_values: Mapping[str, Any]) -> Placement:
    if node.simulated:
        device_actors, cluster_actors = (int(setup_values.get(f"{kind}-actors", 0)) for kind in ("device", "cluster"))
        arrangement = Arrangement(device_actors=device_actors, cluster_actors=cluster_actors)
        return arrangement.placement(node.cluster, num_devices)
    if not node.ray_address:
        return Placement()
    return Placement(ray_address=node.ray_address, host=node.host, num_devices=num_devices)


_CLIPPING: dict[str, Mod] = {"client-fixed": fixedclipping_mod, "client-adaptive": adaptiveclipping_mod}


def packed_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let what follows see the records that were sent; its answer is packed where its order was.

    Raises
    ------
    UnfitPack
        If they cannot be unpacked.
    """
    if not unpack_message(message):
        return call_next(message, context)
    (reply,) = packed_messages([call_next(message, context)])
    return reply


def chosen_mods(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a message through Flower's mod that ``[privacy]`` names; through none by default."""
    mod = _CLIPPING.get(str(context.run_config.get("privacy.update-mechanism")))
    return call_next(message, context) if mod is None else mod(message, context, call_next)
