"""Finding, starting and asking the control unit's actor from any process of its cluster's Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from client_pipeline.runtime.control_unit_actor import ControlUnitActor
from client_pipeline.runtime.device_nodes import check_accelerators, check_answers, check_devices, wait_for_devices
from client_pipeline.runtime.faults import FailedRound
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.round_order import ClusterSetup, RoundOrder, RoundResult
from client_pipeline.runtime.shared_actor import (
    NAMESPACE,
    MemberAbsent,
    all_actors,
    end_actor,
    find_actor,
    start_member,
)
from client_pipeline.runtime.unused_actors import LIVENESS

logger = logging.getLogger("collapipe.actors")

START_TIMEOUT_S = 600.0
"""A control unit loads its data before it can answer."""
DEVICES_TIMEOUT_S = 60.0
"""How long the devices of a cluster may take to join before a run gives up."""
SILENT_S = 60.0
"""How long a control unit that has started may not say that it lives, at most; a thread of its own says so [s]."""
YIELD_S = 60.0
"""How long a control unit of another run may be in its round until a new run is refused: one that has lost its server
leaves its round within 20 s [s]."""
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
        If nobody answers at the cluster's address.
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
            f"this cluster's Ray does not answer at {address}: {error}; start it with collapipe up cu, or run "
            "collapipe doctor cu to find the cause"
        ) from error


def workers_at_once() -> int:
    """How many processes of this one's needs a simulation runs at the same time; 0 if that is not known."""
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
    """Have a control unit that was lost start again; it loads its data and goes on from its own checkpoint.

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
    _end_older_runs(setup)
    absent_devices = tuple(device for device in range(setup.placement.num_devices) if device not in joined_devices)
    if absent_devices:
        logger.warning("%s: continues without devices %s", setup.actor_name, ", ".join(map(str, absent_devices)))
    setup = replace(setup, absent=absent_devices)
    if shared_actor := setup.placement.shared_actor:
        return start_member(shared_actor, setup.runtime.actor_idle, setup.actor_name, ControlUnitActor, setup)
    # The data is here, on the node that this process belongs to.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # A thread of its own answers whether the process still runs while another trains.
    return (
        ray.remote(concurrency_groups={LIVENESS: 1})(ControlUnitActor)
        .options(
            name=setup.actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=this_node,
        )
        .remote(setup)
    )


def train_round(
    run: str,
    cluster: int,
    order: RoundOrder,
    timeout_s: float,
    placement: Placement = Placement(),  # noqa: B008 (it is frozen)
) -> RoundResult:
    """Have the control unit train one round.

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
    join_ray(placement)
    name = f"collapipe/{run}/cluster-{cluster}"
    try:
        actor = find_actor(name, placement.shared_actor)
    except ValueError:
        raise ControlUnitAbsent(f"{name}: {_NOT_RUNNING}") from None
    result: RoundResult = _answer(actor, actor.train_round.remote(order), name, timeout_s)
    return result


def _answer(actor: Any, reference: Any, name: str, timeout_s: float) -> Any:
    """Wait for an answer for as long as the process that owes it lives."""
    # One that starts, or starts again, says nothing while it imports: on a busy machine that takes minutes.
    allowed_s = timeout_s
    first = sign = actor.alive.remote()
    try:
        while not ray.wait([reference], timeout=min(_ASK_S, allowed_s))[0]:
            ray.get(sign, timeout=allowed_s)
            allowed_s, sign = min(timeout_s, SILENT_S), actor.alive.remote()
        return ray.get(reference)
    except ray.exceptions.GetTimeoutError as error:
        _end(actor, ray.get(first) if ray.wait([first], timeout=0)[0] else None)
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


def _end(actor: Any, process: tuple[int, str] | None) -> None:
    """End a control unit that hears nobody: a stopped process does not hear Ray, either."""
    end_actor(actor, with_its_process=True)
    if process is not None and process[1] == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], signal.SIGKILL)


def _end_older_runs(setup: ClusterSetup) -> None:
    """End what other runs have left for the cluster; a control unit in a round is waited for.

    Raises
    ------
    ValueError
        If a control unit of another run stays in its round.
    """
    own_prefix, cluster = f"collapipe/{setup.run}/", f"cluster-{setup.cluster}"
    older = {}
    for name, shared_actor in all_actors(SILENT_S).items():
        parts = name.split("/")
        if parts[0] == "collapipe" and not name.startswith(own_prefix) and len(parts) > 2 and parts[2] == cluster:
            older[name] = shared_actor
    for name, shared_actor in older.items():
        _, run, *place = name.split("/")
        if place == [cluster] and not _gives_way(name, shared_actor):
            raise ValueError(
                f"cluster {setup.cluster}: its control unit has been in a round of another run, {run}, for "
                f"{YIELD_S:g} s; a control unit serves one run at a time: wait until that run ends, or stop it (flwr "
                "stop)"
            )
    for name, shared_actor in older.items():
        # ValueError: it ended in the meantime.
        with contextlib.suppress(ValueError):
            end_actor(find_actor(name, shared_actor))


def _gives_way(name: str, shared_actor: str) -> bool:
    """Wait for a control unit to be between rounds; one that says nothing may be ended."""
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
