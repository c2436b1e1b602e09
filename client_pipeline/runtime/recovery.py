"""Going on after a device was lost: who is left, a plan for them, the TEBs put back, the step again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.faults import FROZEN, KILLED, PARTED, DeviceFault, FaultRecord, LostRound
from client_pipeline.runtime.pipeline import Pipeline
from client_pipeline.runtime.relief import num_moved, pays
from client_pipeline.runtime.replanning import NoPlan, Replan
from client_pipeline.runtime.step_outcome import StepOutcome

T = TypeVar("T")

logger = logging.getLogger("collapipe.recovery")

_KINDS = {KILLED: "device", FROZEN: "freeze", PARTED: "link"}
_TRIES = 3
"""How often devices may lose each other in a row without anyone being gone."""
_STARTS, _LOOK_S = 3.0, 0.2
"""How many times as long as the devices took to start they are waited for if the round cannot go on without them; and
how often they are looked for [s]."""


class Recovery:
    """Runs what needs the devices, and runs it again on those that are left when one is lost.

    Parameters
    ----------
    pipeline : the cluster's
    cluster : its index, for the records
    fault_began : when a fault of a device began [s, ``time.monotonic``], where someone knows: who injects faults
    absent : devices that are not there when the control unit starts; the first round records them
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cluster: int,
        fault_began: Callable[[int], float | None] = lambda device: None,
        absent: Iterable[int] = (),
    ) -> None:
        self.records: list[FaultRecord] = []
        """Records since :meth:`begin_round` of faults that are over."""
        self.plan = ClusterPlan(delta=(), order=(), m=1)
        """Plan that is applied."""
        self._absent_devices = tuple(absent)
        """Empty as soon as they are recorded."""
        self._fault_began = fault_began
        self._pipeline = pipeline
        self._cluster = cluster
        self._replan: Replan | None = None
        self.step = 0
        """Local step in progress; 0 before the first."""
        self.round = 0
        self._replayable = True
        self._decoder_wait_s = 0.0
        self._open: list[tuple[FaultRecord, float]] = []

    @property
    def all_records(self) -> list[FaultRecord]:
        """The round's records so far, with those that are not over."""
        return [*self.records, *(record for record, _ in self._open)]

    def begin_round(self, round_: int, plan: ClusterPlan, replan: Replan, decoder_wait_s: float) -> None:
        """Apply the round's plan, or one for the devices that are there.

        Raises
        ------
        LostRound
            If they cannot hold the TEBs.
        """
        self.records, self._open = [], []
        self.round, self.step, self._replayable = round_, 0, True
        absent, self._absent_devices, now = self._absent_devices, (), time.monotonic()
        reason = "its machine was not there when the control unit started"
        self._open = [(self._record("device", device, reason), now) for device in absent]
        self._replan, self._decoder_wait_s = replan, decoder_wait_s
        self._pipeline.deadline.begin()
        self.plan = self._awaited(plan, self._usable(plan))
        self.use(self.plan)

    def _usable(self, plan: ClusterPlan) -> list[int]:
        """Devices that can be planned with; those that have come back are recorded."""
        away = set(self._pipeline.pool.lost)
        usable = self._pipeline.usable(range(len(plan.delta)))
        for device in sorted(away & set(usable)):
            logger.warning("cluster %s, round %s: device %s is back", self._cluster, self.round, device)
            self.records.append(self._record("joined", device, "it answers again", recovered=True))
        return usable

    def begin_step(self, step: int, replayable: bool) -> None:
        """Say which local step comes, and whether the TEBs can be put back to its beginning."""
        self.step, self._replayable = step, replayable

    def relief_pays(self, slow: Mapping[int, float], outcome: StepOutcome, steps_left: int) -> bool:
        """Say whether the rest of the round gains more from less for slow devices than the move of TEBs takes.

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
        return pays(outcome, relieved, slow, steps_left, self._pipeline.placement.seconds_of_move(moved))

    def _not_lost(self) -> list[int]:
        return [device for device in range(len(self.plan.delta)) if device not in self._pipeline.pool.lost]

    def unburden(self, slow: Mapping[int, float], recorded: Collection[int]) -> None:
        """Plan again with the speed that was measured.

        Parameters
        ----------
        slow : by how much devices are slower than usual
        recorded : those that are in a record already
        """
        where = (self._cluster, self.round)
        for device, factor in sorted(slow.items()):
            logger.warning("cluster %s, round %s: device %s is %.1f times slower than usual", *where, device, factor)
            if device not in recorded:
                record = self._record("slow", device, f"{factor:.1f} times slower than usual")
                began = self._fault_began(device)
                self._open.append((record, time.monotonic() if began is None else began))
        before = self._pipeline.placement.moved_bytes
        # Without a copy of the steps so far none of them can be played again.
        self._replayable = self._pipeline.placement.is_committed
        self.use(self._fitting(self.plan, self._not_lost(), slow))
        moved = self._pipeline.placement.moved_bytes - before
        self._open = [(replace(record, bytes=record.bytes + moved), began) for record, began in self._open]

    def use(self, plan: ClusterPlan) -> None:
        """Change to a plan."""
        self.plan = plan
        self.run(lambda: self._pipeline.apply_plan(self.plan, self._decoder_wait_s))

    def run(self, action: Callable[[], T], prepare_retry: Callable[[], None] = lambda: None) -> T:
        """Run an action; after a fault, put all TEBs back to the last commit on those who are left and run it again.

        Parameters
        ----------
        action : has no effect if it fails
        prepare_retry : what must come before the action after a fault, when a plan is applied

        Raises
        ------
        LostRound
            If there are not enough devices left, the TEBs' copies are too old, or devices are lost again and again.
        """
        parted, tries, faulty = 0, 0, False
        while True:
            try:
                if faulty:
                    self._apply_again()
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

    def _apply_again(self) -> None:
        before = self._pipeline.placement.restored_bytes
        self._pipeline.apply_plan(self.plan, self._decoder_wait_s)
        size = self._pipeline.placement.restored_bytes - before
        self._open = [(replace(record, bytes=record.bytes + size), began) for record, began in self._open]

    def _give_up(self, fault: DeviceFault) -> None:
        last_sign = time.monotonic() - self._pipeline.deadline.waited_s
        # Not asked of the pool afterwards: one whose process ended may be back, and was lost all the same.
        lost_by_device = self._pipeline.give_up_silent()
        usable = self._pipeline.usable(range(len(self.plan.delta)))
        gone = (lost_by_device.keys() & set(self.plan.devices)) | set(fault.devices)
        logger.warning("cluster %s, round %s, step %s: %s", self._cluster, self.round, self.step, fault)
        for device in sorted(gone) if gone else (None,):
            kind = fault.kind if device is None else lost_by_device.get(device, fault.kind)
            began = None if device is None else self._fault_began(device)
            record = self._record(_KINDS[kind], device, str(fault).splitlines()[0][:300])
            self._open.append((record, last_sign if began is None else began))
        if not self._replayable:
            raise LostRound(
                f"{fault}; runtime.snapshots = round keeps no copy of step {self.step - 1}: the round is lost; "
                "set runtime.snapshots = step to replay the step"
            )
        self.plan = self._awaited(self.plan, usable)
        logger.warning("cluster %s continues with %s", self._cluster, self.plan.segments())

    def _awaited(self, plan: ClusterPlan, usable: list[int]) -> ClusterPlan:
        """A plan that fits; if those who are left cannot hold the TEBs, wait for others: they are being started."""
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
        """The plan, if all its devices are there; or another."""
        if set(plan.devices) <= set(usable) and not slowdown:
            return plan
        assert self._replan is not None
        try:
            return self._replan(plan, usable, slowdown or {})
        except NoPlan as error:
            raise LostRound(str(error)) from error

    def note(self, record: FaultRecord) -> None:
        """Add a record of something else that is over."""
        self.records.append(record)

    def finished_micro_batch(self) -> None:
        """Note that a micro-batch is through: whatever was wrong is over."""
        now = time.monotonic()
        opened, self._open = self._open, []
        for record, began in opened:
            self.records.append(replace(record, recovered=True, seconds=now - began))

    def end_round(self, recovered: bool) -> list[FaultRecord]:
        """Return the round's records; what no micro-batch has ended is over with the round, or ended it."""
        opened, self._open = self._open, []
        records, self.records = self.records, []
        return records + [replace(record, recovered=recovered) for record, _ in opened]

    def _record(self, kind: str, device: int | None, reason: str, recovered: bool = False) -> FaultRecord:
        return FaultRecord(
            kind=kind,
            cluster=self._cluster,
            device=device,
            round=self.round,
            step=self.step,
            recovered=recovered,
            reason=reason,
        )
