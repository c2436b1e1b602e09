"""Device actors of one cluster: started, asked, given up, and taken back when they answer again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.device import DeviceActor
from client_pipeline.runtime.devices.frozen_devices import lost_among
from client_pipeline.runtime.devices.shared_actor import (
    end_actor,
    kill_stopped,
    start_actor,
    start_member,
    with_liveness,
)
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.ray.ray_tensors import send_tensors_as_arrays
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.transport.deadline import LEAST_S, ProgressDeadline
from client_pipeline.runtime.transport.faults import FROZEN, KILLED, PARTED, DeviceFault, NotFinite, PipelineError
from client_pipeline.runtime.transport.transport import TransportError

WATCH_INTERVAL_S = 0.2
"""Interval at which a wait looks for a lost device [s]."""


@dataclass
class _Lost:
    kind: str
    actor: Any
    sign: Any
    """Reference of its life sign, which may never come."""


class DevicePool:
    """Handles of the devices by index, and the state of lost devices.

    Parameters
    ----------
    name : the cluster's; actors are named after it
    spec, optimizer, runtime : what a device is made with
    placement : where the devices are
    absent : devices that are lost from the beginning
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        placement: Placement,
        absent: Iterable[int] = (),
    ) -> None:
        send_tensors_as_arrays()
        self.name = name
        self.placement = placement
        self.runtime = runtime
        self.patience_s = LEAST_S
        """Longest wait for a device's life sign: as long as it took to start, on a busy machine [s]."""
        self.pids: dict[int, tuple[int, str]] = {}
        """Process and Ray node of each device that was started."""
        self._made_with = (spec, optimizer, runtime)
        self._actors: dict[int, Any] = {}
        self._lost: dict[int, _Lost] = {}
        self._spare: dict[int, Any] = {}
        """Actors of devices that never had a TEB, and may still be starting."""
        self._seen_spares: dict[int, Any] = {}
        """Spare actors that have answered; one whose process has ended stays until another answers in its place."""
        for device in absent:
            self.miss(device)

    @property
    def running(self) -> list[int]:
        """Devices that were started and are not lost."""
        return sorted(self._actors)

    def handles(self) -> dict[int, Any]:
        """Return actors of the devices that run, and of those without a TEB; for other threads, too."""
        return self._seen_spares | self._actors

    def __getitem__(self, device: int) -> Any:
        """Actor of a device that runs."""
        return self._actors[device]

    # Presence.

    def start(self, devices: Iterable[int], busy: Collection[int] = ()) -> None:
        """Start devices that do not run.

        Parameters
        ----------
        devices : that are needed
        busy : those that hold something and are taken to be there; of the others one may have ended itself for want of
            work, which is no fault

        Raises
        ------
        DeviceFault
            If one does not start within the runtime's timeout, or is frozen.
        """
        wanted = list(devices)
        missing = [device for device in wanted if device not in self._actors]
        idle = self.silent([device for device in wanted if device in self._actors and device not in busy])
        if frozen := tuple(device for device, how in idle.items() if how == FROZEN):
            raise DeviceFault(f"{self.name}: device {frozen[0]}: no answer", FROZEN, frozen)
        for device in missing:
            self.forget_spare(device)
            self._seen_spares.pop(device, None)
        new_actors = {device: self._make(device) for device in [*missing, *idle]}
        if not new_actors:
            return
        start = time.monotonic()
        signs = {device: actor.alive.remote() for device, actor in new_actors.items()}
        ray.wait(list(signs.values()), num_returns=len(signs), timeout=self.runtime.timeout)
        self.patience_s = max(LEAST_S, time.monotonic() - start)
        for device, sign in signs.items():
            try:
                self.pids[device] = ray.get(sign, timeout=0.1)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._lost[device] = _Lost(KILLED, new_actors[device], sign)
                text = f"{self.name}: device {device}: did not start within {self.runtime.timeout:g} s: {error}"
                raise DeviceFault(text, KILLED, (device,)) from error
            self._actors[device] = new_actors[device]

    def _make(self, device: int) -> Any:
        name = f"{self.name}/device-{device}"
        if shared_actor := self.placement.shared_actor_of(device):
            return start_member(shared_actor, self.runtime.actor_idle, name, DeviceActor, *self._made_with)
        arguments, options = (*self._made_with, self.placement.memory_of(device)), self.placement.device_options(device)
        return start_actor(with_liveness(DeviceActor), name, *arguments, **options)

    def spare(self, device: int) -> Any:
        """Return the actor of a device without a TEB that is not lost; start it, without a wait, if it does not run."""
        if device in self._actors:
            return self._actors[device]
        if device not in self._spare:
            self._spare[device] = self._make(device)
        return self._spare[device]

    def note_spare(self, device: int) -> None:
        """Note that a device without a TEB has answered."""
        if device in self._spare:
            self._seen_spares[device] = self._spare[device]

    def forget_spare(self, device: int) -> None:
        """Ask for the device's actor by its name the next time."""
        self._spare.pop(device, None)

    def silent(self, devices: Iterable[int]) -> dict[int, str]:
        """Ask devices for a life sign; returns the kind of loss of those that give none, by device."""
        signs = {d: self._actors[d].alive.remote() for d in devices if d in self._actors}
        return lost_among(signs, self.patience_s)

    def interrupt(self, devices: Iterable[int], generation: int, wait_s: float | None = None) -> dict[int, str]:
        """Interrupt devices in a group; returns the kind of loss of those that do not answer."""
        signs = {d: self._actors[d].interrupt.remote(generation) for d in devices if d in self._actors}
        return lost_among(signs, self.patience_s if wait_s is None else wait_s)

    def lose(self, device: int, kind: str) -> None:
        """Give a device up; one whose process ended is started again, to be there when it is needed next."""
        actor = self._actors.pop(device)
        if kind == KILLED:
            self.miss(device)
        else:
            self._lost[device] = _Lost(kind, actor, actor.alive.remote())

    def miss(self, device: int) -> None:
        """Count a device without a process as lost; a process starts as soon as its machine is there."""
        # Its number may soon be another process's.
        self.pids.pop(device, None)
        actor = self._make(device)
        self._lost[device] = _Lost(KILLED, actor, actor.alive.remote())

    def is_back(self, device: int) -> bool:
        """Take a lost device back if it has answered since; returns at once, true if it has."""
        lost_device = self._lost[device]
        if not ray.wait([lost_device.sign], timeout=0)[0]:
            return False
        try:
            self.pids[device] = ray.get(lost_device.sign)
        except ray.exceptions.RayActorError:
            # The new process ended, too; or the name still stood for the old one.
            self.miss(device)
            return False
        self._actors[device] = lost_device.actor
        del self._lost[device]
        return True

    @property
    def lost(self) -> dict[int, str]:
        """Devices that were given up and have not been taken back, and how they were lost."""
        return {device: lost.kind for device, lost in sorted(self._lost.items())}

    # Waiting for answers.

    def answers(self, references: Mapping[int, Any], activity: str) -> dict[int, Any]:
        """Wait for one answer of each device.

        Raises
        ------
        DeviceFault
            If one ended, froze or lost the others.
        PipelineError
            If one failed, or does not answer although it is there; the message names it.
        """
        references_left, answers = dict(references), dict.fromkeys(references)
        deadline = ProgressDeadline(self.runtime.timeout, first_s=LEAST_S)
        while references_left:
            ready_references, _ = ray.wait(list(references_left.values()), num_returns=1, timeout=WATCH_INTERVAL_S)
            if ready_references:
                deadline.progress()
            for device in [device for device, reference in references_left.items() if reference in ready_references]:
                answers[device] = self._answer(device, references_left.pop(device), activity)
            if references_left and not ready_references:
                self.look_after(references_left, deadline, activity)
        return answers

    def look_after(self, devices: Iterable[int], deadline: ProgressDeadline, activity: str) -> None:
        """Ask devices for a life sign if a wait for them is overdue.

        Raises
        ------
        DeviceFault
            If one is not.
        PipelineError
            If all are, but the wait has had its time.
        """
        if not deadline.overdue:
            return
        devices = list(devices)
        if lost_devices := self.silent(devices):
            device, kind = next(iter(lost_devices.items()))
            happened = "no answer" if kind == FROZEN else "its process ended"
            text = f"{self.name}: device {device}: {happened}, while {activity}"
            raise DeviceFault(text, kind, tuple(d for d, k in lost_devices.items() if k == kind))
        if deadline.expired:
            raise PipelineError(
                f"{self.name}: {activity}: no answer from devices {devices} within {deadline.most_s:g} s"
            )
        deadline.extend()

    def _answer(self, device: int, reference: Any, activity: str) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as error:
            # It may be another's end: that of the device which was to hand it a TEB.
            ended = tuple(d for d, how in self.silent(self._actors).items() if how == KILLED)
            if not ended:
                raise DeviceFault(f"{self.name}: {activity}: {error}", PARTED) from error
            text = f"{self.name}: {activity}: device {ended[0]}: its process ended: {error}"
            raise DeviceFault(text, KILLED, ended) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause or error
            text = f"{self.name}: {activity}: device {device}: {cause}"
            if isinstance(cause, TransportError):
                raise DeviceFault(text, PARTED) from error
            raise (NotFinite if isinstance(cause, NotFinite) else PipelineError)(text) from error
        except ray.exceptions.RayError as error:
            # A copy that was lost with the machine that it was on, before it had come here.
            raise PipelineError(f"{self.name}: {activity}: device {device}: {error}") from error

    def call(self, devices: Iterable[int], call: Callable[[Any, int], Any], activity: str) -> dict[int, Any]:
        """Call devices at once; answers by device."""
        return self.answers({device: call(self._actors[device], device) for device in devices}, activity)

    # The end.

    def close(self) -> None:
        """End all devices."""
        lost_actors = {device: lost.actor for device, lost in self._lost.items()}
        for device, actor in (self._spare | self._actors | lost_actors).items():
            end_actor(actor)
            if device in self._lost:
                kill_stopped(*self.pids.get(device, (0, "")))
        self._actors.clear()
        self._lost.clear()
        self._spare.clear()
        self._seen_spares.clear()
