"""The device actors of one cluster: started, asked, given up, and taken back when they answer again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.deadline import LEAST_S, ProgressDeadline
from client_pipeline.runtime.device import DeviceActor
from client_pipeline.runtime.faults import FROZEN, KILLED, PARTED, DeviceFault, NotFinite, PipelineError
from client_pipeline.runtime.frozen_devices import fault_of_step, lost_among
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.ray_tensors import send_tensors_as_arrays
from client_pipeline.runtime.shared_actor import NAMESPACE, end_actor, start_member
from client_pipeline.runtime.transport import TransportError
from client_pipeline.runtime.unused_actors import LIVENESS

WATCH_INTERVAL_S = 0.2
"""How often a wait looks for a device that is gone."""


@dataclass
class _Lost:
    kind: str
    actor: Any
    sign: Any
    """Its answer, if ever one comes, to the question whether it is there."""


class DevicePool:
    """Handles of the devices by index, and what is known of those that are lost.

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
        self._placement = placement
        self.runtime = runtime
        self.patience_s = LEAST_S
        """How long a device may take to say that it is there: as long as it took to start, on a busy machine [s]."""
        self.pids: dict[int, tuple[int, str]] = {}
        """Process and Ray node of each device that was started."""
        self._made_with = (spec, optimizer, runtime)
        self._actors: dict[int, Any] = {}
        self._lost: dict[int, _Lost] = {}
        self._spare: dict[int, Any] = {}
        """Actors of devices that never had a TEB, and may still be starting."""
        for device in absent:
            self.miss(device)

    @property
    def shares_processes(self) -> bool:
        """Whether a process may hold more than one device."""
        return bool(self._placement.shared_actors)

    @property
    def is_spread(self) -> bool:
        """Whether devices are machines of their own."""
        return self._placement.spread

    @property
    def running(self) -> list[int]:
        """Devices that were started and are not lost."""
        return sorted(self._actors)

    def handles(self) -> dict[int, Any]:
        """Actors of the devices that run; for other threads, too."""
        return dict(self._actors)

    def __getitem__(self, device: int) -> Any:
        """Actor of a device that runs."""
        return self._actors[device]

    # Who is there.

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
        if shared_actor := self._placement.shared_actor_of(device):
            return start_member(shared_actor, self.runtime.actor_idle, name, DeviceActor, *self._made_with)
        # A thread of its own says whether the process is there while another computes.
        return (
            ray.remote(concurrency_groups={LIVENESS: 1})(DeviceActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                **self._placement.device_options(device),
            )
            .remote(*self._made_with, self._placement.memory_of(device))
        )

    def spare(self, device: int) -> Any:
        """Actor of a device that is not lost and has no TEB; one that does not run is started and not waited for."""
        if device in self._actors:
            return self._actors[device]
        if device not in self._spare:
            self._spare[device] = self._make(device)
        return self._spare[device]

    def forget_spare(self, device: int) -> None:
        """Ask for the device's actor by its name the next time."""
        self._spare.pop(device, None)

    def silent(self, devices: Iterable[int]) -> dict[int, str]:
        """Ask devices whether they are there; returns how those are lost that do not say so, by device."""
        signs = {d: self._actors[d].alive.remote() for d in devices if d in self._actors}
        return lost_among(signs, self.patience_s)

    def interrupt(self, devices: Iterable[int], generation: int, wait_s: float | None = None) -> dict[int, str]:
        """Break off what devices are doing in a group; returns how those are lost that do not answer."""
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
        """Take a device for lost that has no process; one is started, where and as soon as its machine is there."""
        # Its number may soon be another process's.
        self.pids.pop(device, None)
        actor = self._make(device)
        self._lost[device] = _Lost(KILLED, actor, actor.alive.remote())

    def is_back(self, device: int) -> bool:
        """Whether a lost device has answered since; if so it is one of the pool again. Does not wait."""
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
        """Ask devices whether they are there if a wait for them is overdue.

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

    def fault_of(self, references: Mapping[int, Any], failed: BaseException | None) -> PipelineError | None:
        """The device at fault in a step, if there is one."""
        return fault_of_step(self.name, references, failed, self.silent)

    def call(self, devices: Iterable[int], call: Callable[[Any, int], Any], activity: str) -> dict[int, Any]:
        """Call devices at once; answers by device."""
        return self.answers({device: call(self._actors[device], device) for device in devices}, activity)

    # The end.

    def close(self) -> None:
        """End all devices."""
        this_node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        lost_actors = {device: lost.actor for device, lost in self._lost.items()}
        for device, actor in (self._spare | self._actors | lost_actors).items():
            end_actor(actor)
            pid, node = self.pids.get(device, (0, ""))
            # A process that was stopped hears no one but the system.
            if device in self._lost and pid and node == this_node:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._actors.clear()
        self._lost.clear()
        self._spare.clear()
