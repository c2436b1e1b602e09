"""Finding, starting and asking the control unit's actor from any process of its cluster's Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from client_pipeline.runtime.control_unit.control_unit_actor import ControlUnitActor
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder, RoundResult
from client_pipeline.runtime.devices.device_nodes import (
    check_accelerators,
    check_answers,
    check_devices,
    wait_for_devices,
)
from client_pipeline.runtime.devices.shared_actor import (
    NAMESPACE,
    MemberAbsent,
    all_actors,
    end_actor,
    find_actor,
    kill_stopped,
    start_actor,
    start_member,
    with_liveness,
)
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.transport.faults import FailedRound

logger = logging.getLogger("collapipe.actors")

START_TIMEOUT_S = 600.0
"""Longest start of a control unit, which loads its data before it answers [s]."""
DEVICES_TIMEOUT_S = 60.0
"""Time for the devices of a cluster to join, before a run gives up [s]."""
SILENT_S = 60.0
"""Longest silence of a control unit that has started [s]; a thread of its own answers."""
YIELD_S = 60.0
"""Longest wait for the round of another run's control unit, before a new run is refused [s]. A control unit that has
lost its server leaves its round within 20 s."""
_ASK_S = 5.0
_NOT_RUNNING = "no control unit is running; it ends itself when idle (runtime.actor-idle)"


class ControlUnitError(RuntimeError):
    """The control unit failed, ended or never started; the message says which and why.

    Parameters
    ----------
    message : names the control unit
    faults : what went wrong in the round, as JSON values, where it could say so itself
    """

    def __init__(self, message: str, faults: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.faults = faults or []


class ControlUnitLost(ControlUnitError):
    """The control unit's process ended, or does not answer: it must be started again."""


class ControlUnitAbsent(ControlUnitLost):
    """There is no such process: it was lost before, or had nothing to do for long."""


def join_ray(placement: Placement) -> None:
    """Use the Ray that runs here: the simulation's, or the cluster's own, which ``ray start`` opened on an edge box.

    Raises
    ------
    ValueError
        If no Ray answers at the cluster's address.
    """
    if ray.is_initialized():
        return
    address = placement.ray_address or "auto"
    # Several Ray nodes may run on one machine: the address says which is this control unit's.
    own_address = {"_node_ip_address": placement.host} if placement.spread else {}
    try:
        check_answers(placement.ray_address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **own_address)
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise ValueError(
            f"this cluster's Ray does not answer at {address}: {error}; start it with collapipe join, or run "
            "collapipe doctor box to find the cause"
        ) from error


def workers_at_once() -> int:
    """Count the processes like this one that a simulation runs at the same time; 0 if that is unknown."""
    context = ray.get_runtime_context()
    # A simulated client is an actor; on a real machine it is a program of its own, and runs when it likes.
    needs = context.get_assigned_resources() if context.get_actor_id() else {}
    needs = {name: amount for name, amount in needs.items() if amount}
    if not needs:
        return 0
    offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(offer.get(name, 0) / amount) for name, amount in needs.items()) for offer in offers)


def start_control_unit(setup: ClusterSetup) -> dict[str, Any]:
    """Start the control unit, after ending those that older runs left for the same cluster.

    One that is in a round of another run is not ended. A new run wants all devices of the cluster. One that is resumed
    goes on with those that join.

    Returns
    -------
    Its description, with the ``machines`` of the devices that are nodes of their own.

    Raises
    ------
    ControlUnitError, ValueError
        ValueError is the control unit's own: data that is missing or does not fit; or another run uses the cluster, or
        a device has not the accelerator that is asked for.
    """
    joined = _joined_devices(setup, DEVICES_TIMEOUT_S, least=1 if setup.resume_round else None)
    machines = check_devices(joined)
    check_accelerators(setup.runtime.accelerator, joined)
    actor = _make(setup, joined)
    described = _answer(actor, actor.prepare.remote(), setup.actor_name, START_TIMEOUT_S)
    return {**described, "machines": machines}


def restart_control_unit(setup: ClusterSetup) -> None:
    """Start a lost control unit again; it loads its data and goes on from its own checkpoint.

    It goes on with the devices that are there; the others were checked when the run began, and may come back.

    Raises
    ------
    ControlUnitAbsent
        If it cannot: no device is there, or no Ray.
    """
    # One that was lost just now leaves the Ray that its devices have joined; when the whole machine was started again
    # they are still on their way.
    wait_s = DEVICES_TIMEOUT_S if setup.lost_at is None else 0.0
    try:
        actor = _make(setup, _joined_devices(setup, wait_s, least=1))
    except ValueError as error:
        raise ControlUnitAbsent(f"{setup.actor_name}: the control unit cannot start again: {error}") from error
    actor.prepare.remote()


def _joined_devices(setup: ClusterSetup, wait_s: float, least: int | None) -> dict[int, str]:
    """The devices of the cluster's own Ray, if it has one; see :func:`wait_for_devices`."""
    join_ray(setup.placement)
    return wait_for_devices(setup.placement.num_devices, wait_s, least) if setup.placement.spread else {}


def _make(setup: ClusterSetup, joined_devices: Collection[int]) -> Any:
    end_older_runs(setup.run, setup.cluster)
    absent_devices = tuple(device for device in range(setup.placement.num_devices) if device not in joined_devices)
    if absent_devices:
        logger.warning("%s: continues without devices %s", setup.actor_name, ", ".join(map(str, absent_devices)))
    setup = replace(setup, absent=absent_devices)
    if shared_actor := setup.placement.shared_actor:
        return start_member(shared_actor, setup.runtime.actor_idle, setup.actor_name, ControlUnitActor, setup)
    # The data is here, on the node that this process belongs to.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return start_actor(with_liveness(ControlUnitActor), setup.actor_name, setup, scheduling_strategy=this_node)


def train_round(
    run: str,
    cluster: int,
    order: RoundOrder,
    timeout_s: float,
    placement: Placement = Placement(),  # noqa: B008 (it is frozen)
) -> RoundResult:
    """Train one round on the control unit.

    Parameters
    ----------
    run, cluster : as in the set-up
    order : the round
    timeout_s : a control unit that does not say within this time that it lives is given up; its own waits are bounded
    placement : as in the set-up

    Raises
    ------
    ControlUnitAbsent, ControlUnitLost
        If there is no such process; or if it ended, or does not answer: then it is ended.
    ControlUnitError, ValueError
        ValueError is the control unit's own: a plan or weights that do not fit.
    """
    name, actor = _find(run, cluster, placement)
    result: RoundResult = _answer(actor, actor.train_round.remote(order), name, timeout_s)
    return result


def begin_round(run: str, cluster: int, order: RoundOrder, timeout_s: float, placement: Placement) -> None:
    """Order the control unit to train one round, whose result :func:`collect_round` returns.

    Parameters and errors are those of :func:`train_round`.
    """
    name, actor = _find(run, cluster, placement)
    result = actor.train_round.remote(order)
    _answer(actor, actor.keep.remote(order.round, [result]), name, timeout_s)


def collect_round(
    run: str, cluster: int, round_: int, timeout_s: float, placement: Placement, wait_s: float
) -> RoundResult | None:
    """Return the result of a round that was begun; None if it is not over within ``wait_s`` seconds.

    Raises
    ------
    ControlUnitLost
        Also if the control unit has ended or was started again since. Other errors are those of :func:`train_round`.
    """
    try:
        name, actor = _find(run, cluster, placement)
        kept = _answer(actor, actor.kept.remote(round_), name, timeout_s)
    except ControlUnitAbsent as absent:
        raise ControlUnitLost(f"{absent}; it ended in round {round_}") from None
    if not kept:
        raise ControlUnitLost(f"{name}: the control unit was started again in round {round_}")
    if not ray.wait(kept, timeout=wait_s)[0]:
        return None
    result: RoundResult = _answer(actor, kept[0], name, timeout_s)
    return result


def _find(run: str, cluster: int, placement: Placement) -> tuple[str, Any]:
    """Return a control unit's name and actor; raises :class:`ControlUnitAbsent` if there is none."""
    join_ray(placement)
    name = f"collapipe/{run}/cluster-{cluster}"
    try:
        return name, find_actor(name, placement.shared_actor)
    except ValueError:
        raise ControlUnitAbsent(f"{name}: {_NOT_RUNNING}") from None


def _answer(actor: Any, reference: Any, name: str, timeout_s: float) -> Any:
    """Wait for an answer while the process that answers is alive."""
    # One that starts, or starts again, says nothing while it imports: on a busy machine that takes minutes.
    allowed_s = timeout_s
    first = sign = actor.alive.remote()
    try:
        while not ray.wait([reference], timeout=min(_ASK_S, allowed_s))[0]:
            ray.get(sign, timeout=allowed_s)
            allowed_s, sign = min(timeout_s, SILENT_S), actor.alive.remote()
        return ray.get(reference)
    except ray.exceptions.GetTimeoutError as error:
        process: tuple[int, str] = (0, "")
        # Before the actor is ended, which answers every question with an error.
        with contextlib.suppress(ray.exceptions.RayError):
            process = ray.get(first, timeout=0)
        end_actor(actor, with_its_process=True)
        kill_stopped(*process)
        raise ControlUnitLost(f"{name}: the control unit has given no sign of life for {allowed_s:g} s") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | FileNotFoundError):
            raise error.cause from None
        if isinstance(error.cause, MemberAbsent):
            raise ControlUnitAbsent(f"{name}: {_NOT_RUNNING}") from None
        if isinstance(error.cause, FailedRound):
            raise ControlUnitError(f"{name}: {error.cause}", error.cause.faults) from error
        raise ControlUnitError(f"{name}: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayActorError as error:
        raise ControlUnitLost(f"{name}: the control unit's process ended") from error


def end_older_runs(own_run: str, number: int) -> None:
    """End the actors that other runs have left for a cluster; wait for a control unit in a round.

    Parameters
    ----------
    own_run : whose actors stay
    number : of the cluster

    Raises
    ------
    ValueError
        If a control unit of another run stays in its round.
    """
    own_prefix, cluster = f"collapipe/{own_run}/", f"cluster-{number}"
    older = {}
    for name, shared_actor in all_actors(SILENT_S).items():
        parts = name.split("/")
        if parts[0] == "collapipe" and not name.startswith(own_prefix) and len(parts) > 2 and parts[2] == cluster:
            older[name] = shared_actor
    for name, shared_actor in older.items():
        _, run, *place = name.split("/")
        if place == [cluster] and not _gives_way(name, shared_actor):
            raise ValueError(
                f"cluster {number}: its control unit has been in a round of another run, {run}, for "
                f"{YIELD_S:g} s; a control unit serves one run at a time: wait until that run ends, or stop it (flwr "
                "stop)"
            )
    for name, shared_actor in older.items():
        # ValueError: it ended in the meantime.
        with contextlib.suppress(ValueError):
            end_actor(find_actor(name, shared_actor))


def _gives_way(name: str, shared_actor: str) -> bool:
    """Wait until a control unit is between rounds; one that does not answer may be ended."""
    deadline = time.monotonic() + YIELD_S
    try:
        actor = find_actor(name, shared_actor)
        while ray.get(actor.in_use.remote(), timeout=SILENT_S):
            if time.monotonic() > deadline:
                return False
            time.sleep(min(1.0, YIELD_S / 4))
    except (ValueError, AttributeError, ray.exceptions.RayError):
        pass
    return True
