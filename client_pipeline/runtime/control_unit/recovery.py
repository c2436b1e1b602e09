"""Recovery after the loss of a device: a plan for the devices that are left, TEBs put back, the step again."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from client_pipeline.partition.plan import ClusterPlan, Segment
from client_pipeline.runtime.control_unit.round_faults import RoundFaults
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.transport.faults import FROZEN, KILLED, PARTED, DeviceFault, LostRound
from client_pipeline.timetable.replanning import NoPlan, Replan

T = TypeVar("T")

logger = logging.getLogger("collapipe.recovery")

_KINDS = {KILLED: "device", FROZEN: "freeze", PARTED: "link"}
SURELY = 2.0
"""Factor by which the gain of a relief must exceed its move: both are estimates, and the slow device may recover."""
_TRIES = 3
"""Times that devices may lose each other in a row while none is gone."""
_STARTS, _LOOK_S = 3.0, 0.2
"""Longest wait for devices that the round needs, in start-up times of a device; and the interval of looks [s]."""


class Recovery:
    """Runner of actions on the devices; after a loss the action runs again on the devices that are left.

    Parameters
    ----------
    pipeline : the cluster's
    faults : records of the round in progress
    fault_began : time at which a fault of a device was injected [s, ``time.monotonic``]; None if none was
    absent : devices that are not there when the control unit starts; the first round records them
    """

    def __init__(
        self,
        pipeline: Pipeline,
        faults: RoundFaults,
        fault_began: Callable[[int], float | None] = lambda device: None,
        absent: Iterable[int] = (),
    ) -> None:
        self.plan = ClusterPlan(delta=(), order=(), m=1)
        """Plan that is applied."""
        self._absent_devices = tuple(absent)
        """Empty as soon as they are recorded."""
        self._fault_began = fault_began
        self._pipeline, self._faults = pipeline, faults
        self._replan: Replan | None = None
        self._replayable = True
        self._decoder_wait_s = 0.0

    def begin_round(self, plan: ClusterPlan, replan: Replan, decoder_wait_s: float) -> None:
        """Apply the round's plan, or one for the devices that are there.

        Raises
        ------
        LostRound
            If they cannot hold the TEBs.
        """
        self._replayable = True
        absent, self._absent_devices, now = self._absent_devices, (), time.monotonic()
        for device in absent:
            self._faults.open("device", device, "its machine was not there when the control unit started", now)
        self._replan, self._decoder_wait_s = replan, decoder_wait_s
        self._pipeline.deadline.begin()
        self.plan = self._awaited(plan, self._usable(plan))
        self.use(self.plan)

    def _usable(self, plan: ClusterPlan) -> list[int]:
        """Return the devices that a plan may use; those that have come back are recorded."""
        away = set(self._pipeline.pool.lost)
        usable = self._pipeline.usable(range(len(plan.delta)))
        for device in sorted(away & set(usable)):
            logger.warning("cluster %s, round %s: device %s is back", self._faults.cluster, self._faults.round, device)
            self._faults.close("joined", device, "it answers again")
        return usable

    def begin_step(self, step: int, replayable: bool) -> None:
        """Begin a local step; ``replayable`` if the TEBs can be put back to its beginning."""
        self._faults.begin_step(step)
        self._replayable = replayable

    def relief_pays(self, slow: Mapping[int, float], outcome: StepOutcome, steps_left: int) -> bool:
        """Compare the time that the rest of the round gains from less for slow devices with that of the TEBs' move.

        Parameters
        ----------
        slow : by how much devices are slower than usual
        outcome : of the last step
        steps_left : local steps of the round
        """
        if not self._pipeline.placement.can_move:
            return False
        try:
            relieved = self._fitting(self.plan, self._not_lost(), slow)
        except LostRound:
            return False
        moved = num_moved(outcome.segments, relieved.segments())
        gain_s = steps_left * saved_s(outcome, relieved, slow)
        return gain_s > SURELY * self._pipeline.placement.seconds_of_move(moved)

    def _not_lost(self) -> list[int]:
        return [device for device in range(len(self.plan.delta)) if device not in self._pipeline.pool.lost]

    def unburden(self, slow: Mapping[int, float], recorded: Collection[int]) -> None:
        """Plan again with the speed that was measured.

        Parameters
        ----------
        slow : by how much devices are slower than usual
        recorded : those that are in a record already
        """
        where = (self._faults.cluster, self._faults.round)
        for device, factor in sorted(slow.items()):
            logger.warning("cluster %s, round %s: device %s is %.1f times slower than usual", *where, device, factor)
            if device not in recorded:
                began = self._fault_began(device)
                reason = f"{factor:.1f} times slower than usual"
                self._faults.open("slow", device, reason, time.monotonic() if began is None else began)
        before = self._pipeline.placement.moved_bytes
        # Without a copy of the steps so far none of them can be played again.
        self._replayable = self._pipeline.placement.is_committed
        self.use(self._fitting(self.plan, self._not_lost(), slow))
        self._faults.add_bytes(self._pipeline.placement.moved_bytes - before)

    def use(self, plan: ClusterPlan) -> None:
        """Change to a plan."""
        self.plan = plan
        self.run(lambda: self._pipeline.apply_plan(self.plan, self._decoder_wait_s))

    def run(self, action: Callable[[], T], prepare_retry: Callable[[], None] = lambda: None) -> T:
        """Run an action; after a fault, put all TEBs back to the last commit on the other devices and run it again.

        Parameters
        ----------
        action : has no effect if it fails
        prepare_retry : called before the action after a fault, when a plan is applied

        Raises
        ------
        LostRound
            If there are not enough devices left, the TEBs' copies are too old, or devices are lost again and again.
        """
        parted, tries, faulty = 0, 0, False
        while True:
            try:
                if faulty:
                    before = self._pipeline.placement.restored_bytes
                    self._pipeline.apply_plan(self.plan, self._decoder_wait_s)
                    self._faults.add_bytes(self._pipeline.placement.restored_bytes - before)
                    prepare_retry()
                return action()
            except DeviceFault as fault:
                parted = parted + 1 if fault.kind == PARTED else 0
                if parted > _TRIES:
                    raise
                tries += 1
                self._give_up(fault)
                if tries > _TRIES * len(self.plan.delta):
                    # What kills a device may be the step itself: too little memory, or a broken kernel.
                    raise LostRound(f"{fault}; devices were lost {tries} times in one action") from fault
                faulty = True

    def _give_up(self, fault: DeviceFault) -> None:
        last_sign = time.monotonic() - self._pipeline.deadline.waited_s
        # Not asked of the pool afterwards: one whose process ended may be back, and was lost all the same.
        lost_by_device = self._pipeline.give_up_silent()
        usable = self._pipeline.usable(range(len(self.plan.delta)))
        gone = (lost_by_device.keys() & set(self.plan.devices)) | set(fault.devices)
        round_, step = self._faults.round, self._faults.step
        logger.warning("cluster %s, round %s, step %s: %s", self._faults.cluster, round_, step, fault)
        for device in sorted(gone) if gone else (None,):
            kind = fault.kind if device is None else lost_by_device.get(device, fault.kind)
            began = None if device is None else self._fault_began(device)
            # The record names cluster and device.
            reason = str(fault).splitlines()[0].removeprefix(f"{self._pipeline.name}: ")
            reason = reason.removeprefix(f"device {device}: ")[:300]
            self._faults.open(_KINDS[kind], device, reason, last_sign if began is None else began)
        if not self._replayable:
            raise LostRound(
                f"{fault}; runtime.snapshots = round keeps no copy of step {step - 1}: the round is lost; "
                "set runtime.snapshots = step to replay the step"
            )
        self.plan = self._awaited(self.plan, usable)
        logger.warning("cluster %s continues with %s", self._faults.cluster, self.plan.segments())

    def _awaited(self, plan: ClusterPlan, usable: list[int]) -> ClusterPlan:
        """Return a plan that fits; wait for devices that are being started if the others cannot hold the TEBs."""
        pool = self._pipeline.pool
        until = time.monotonic() + min(_STARTS * pool.patience_s, pool.runtime.timeout)
        while True:
            try:
                return self._fitting(plan, usable)
            except LostRound:
                if not pool.lost or time.monotonic() > until:
                    raise
            time.sleep(_LOOK_S)
            usable = self._usable(plan)

    def _fitting(
        self, plan: ClusterPlan, usable: list[int], slowdown: Mapping[int, float] | None = None
    ) -> ClusterPlan:
        """Return the plan if all its devices are there, else another."""
        if set(plan.devices) <= set(usable) and not slowdown:
            return plan
        assert self._replan is not None
        try:
            return self._replan(plan, usable, slowdown or {})
        except NoPlan as error:
            raise LostRound(str(error)) from error


def saved_s(outcome: StepOutcome, relieved: ClusterPlan, slow: Collection[int]) -> float:
    """Return by how much a step's slowest stage becomes shorter [s].

    A device that had no TEB counts as fast as the middle one.

    Parameters
    ----------
    outcome : of the last step, under the old segments
    relieved : the plan with less for the slow devices
    slow : devices
    """
    teb_s = {s.device: outcome.devices[s.device].busy_s / len(s.blocks) for s in outcome.segments}
    others = [seconds for device, seconds in teb_s.items() if device not in slow]
    middle = statistics.median(others or teb_s.values())

    def slowest_s(segments: list[Segment]) -> float:
        return max(len(s.blocks) * teb_s.get(s.device, middle) for s in segments)

    return slowest_s(outcome.segments) - slowest_s(relieved.segments())


def num_moved(old: list[Segment], new: list[Segment]) -> int:
    """Count the TEBs that change their device."""
    owners = [{index: segment.device for segment in segments for index in segment.blocks} for segments in (old, new)]
    return sum(owners[0][index] != device for index, device in owners[1].items())
