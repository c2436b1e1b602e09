"""Decisions when a device is lost: the devices given up, the records, and the end of the round."""

import time
from types import SimpleNamespace

import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit import recovery as recovery_module
from client_pipeline.runtime.control_unit.recovery import Recovery
from client_pipeline.runtime.control_unit.round_faults import RoundFaults
from client_pipeline.runtime.transport.faults import FROZEN, KILLED, PARTED, DeviceFault, LostRound
from client_pipeline.timetable.replanning import ProportionalReplan, equal_devices
from helpers.fake_pipeline import FakePipeline

THREE = ClusterPlan(delta=(1, 2, 1), order=(0, 1, 2), m=4, schedule="1f1b")
LEAN = ProportionalReplan(speed=(1.0,) * 3, capacity=(2,) * 3)
"""Two devices hold the four TEBs, one does not."""


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.setattr(recovery_module, "_LOOK_S", 0.001)
    return FakePipeline()


def begun(pipeline, plan=THREE, replan=LEAN, step=2, replayable=True, fault_began=lambda device: None):
    faults = RoundFaults(7)
    faults.begin_round(5)
    recovery = Recovery(pipeline, faults, fault_began)
    recovery.begin_round(plan, replan, 3.5)
    recovery.begin_step(step, replayable)
    pipeline.asked.clear()
    return recovery, faults


class Action:
    """Fails as often as there are faults, then answers."""

    def __init__(self, *faults):
        self.faults, self.calls = list(faults), []

    def __call__(self):
        self.calls.append("action")
        if self.faults:
            raise self.faults.pop(0)
        return "done"

    def again(self):
        self.calls.append("again")


def records(faults):
    return [(r.kind, r.device, r.recovered) for r in faults.records]


def test_without_a_copy_of_the_step_before_the_round_is_lost_and_says_why(pipeline):
    recovery, faults = begun(pipeline, step=3, replayable=False)
    pipeline.kill(1)
    action = Action(DeviceFault(f"{pipeline.name}: device 1: its process ended", KILLED, (1,)))
    reason = "device 1: its process ended; runtime.snapshots = round keeps no copy of step 2: the round is lost"
    with pytest.raises(LostRound, match=reason):
        recovery.run(action, action.again)
    assert action.calls == ["action"] and pipeline.plans == []
    [record] = faults.end_round(recovered=False)
    assert (record.kind, record.device, record.step, record.recovered) == ("device", 1, 3, False)
    # Of which cluster and device it is the record says.
    assert record.reason == "its process ended"
    # The next round can be played from its beginning.
    faults.begin_round(6)
    recovery.begin_round(THREE, LEAN, 0.0)
    assert recovery.run(Action(DeviceFault("device 1: again", KILLED, (1,)))) == "done"


def test_too_few_devices_lose_the_round_unless_one_is_on_its_way(pipeline):
    recovery, faults = begun(pipeline)
    pipeline.kill(0, 1)
    fault = DeviceFault("two ended", KILLED, (0, 1))
    with pytest.raises(LostRound, match=r"devices \[2\] are left and hold 2 TEBs, 4 are needed"):
        recovery.run(Action(fault))
    pipeline.pool.lost.clear()
    pipeline.dead.clear()
    recovery, faults = begun(pipeline)
    pipeline.kill(0, 1)
    pipeline.returns_after = {1: 3}
    assert recovery.run(Action(fault)) == "done"
    assert recovery.plan.devices == [1, 2]
    assert records(faults) == [("joined", 1, True), ("device", 0, False), ("device", 1, False)]


def test_devices_that_lose_each_other_are_all_kept_three_times_in_a_row(pipeline):
    lost = [DeviceFault(f"number {i}", PARTED) for i in range(4)]
    recovery, faults = begun(pipeline)
    assert recovery.run(Action(*lost[:3])) == "done" and recovery.plan == THREE
    assert records(faults) == [("link", None, False)] * 3
    with pytest.raises(DeviceFault, match="number 3"):
        begun(pipeline)[0].run(Action(*lost))
    # A loss between them begins the count anew.
    between = DeviceFault("device 0: no answer", FROZEN, (0,))
    assert begun(pipeline)[0].run(Action(*lost[:3], between, *lost[:3])) == "done"
    with pytest.raises(LostRound, match="devices were lost 10 times in one action"):
        begun(pipeline)[0].run(Action(*[between] * 10))


def test_the_first_finished_micro_batch_ends_a_fault_and_says_how_long_it_took(pipeline):
    injected = {}
    recovery, faults = begun(pipeline, fault_began=injected.get)
    pipeline.deadline.waited_s = 20.0
    recovery.run(Action(DeviceFault("device 0", FROZEN, (0,)), DeviceFault("lost", PARTED)))
    injected[1] = time.monotonic() - 500.0
    recovery.run(Action(DeviceFault("device 1", FROZEN, (1,))))
    faults.finished_micro_batch()
    faults.finished_micro_batch()
    # From the last sign of progress, or from when the fault was put in, where that is known.
    assert [r.seconds for r in faults.records] == [pytest.approx(s, abs=5.0) for s in (20.0, 20.0, 500.0)]
    assert all(r.recovered for r in faults.records)
    recovery.run(Action(DeviceFault("device 2", FROZEN, (2,))))
    ended = faults.end_round(recovered=False)
    assert [r.recovered for r in ended] == [True, True, True, False]
    assert ended[3].seconds is None
    assert faults.end_round(recovered=True) == []


def test_slow_devices_get_less_and_are_recorded_once(pipeline):
    recovery, faults = begun(pipeline, replan=equal_devices(3, 4))
    pipeline.moved_by_plan = 33
    recovery.unburden({1: 8.0, 0: 2.0}, recorded=())
    assert [(r.kind, r.device, r.bytes) for r in faults.records] == [("slow", 0, 33), ("slow", 1, 33)]
    assert faults.records[1].reason == "8.0 times slower than usual"
    assert recovery.plan.delta == (1, 1, 2)
    recovery.unburden({1: 9.0}, recorded=(0, 1))
    assert len(faults.records) == 2
    # Who is lost is not planned with, however fast it was.
    pipeline.pool.lost = {2: KILLED}
    recovery.unburden({0: 9.0}, recorded=(0, 1))
    assert recovery.plan.delta[2] == 0


@pytest.mark.parametrize(
    ("steps_left", "move_s", "can_move", "pays"),
    [(3, 7.4, True, True), (3, 7.5, True, False), (2, 7.4, True, False), (3, 0.1, False, False)],
)
def test_a_move_pays_if_it_gains_more_than_twice_its_time(pipeline, steps_left, move_s, can_move, pays):
    recovery, _ = begun(pipeline)
    devices = {device: SimpleNamespace(busy_s=busy_s) for device, busy_s in ((0, 1.0), (1, 10.0), (2, 1.0))}
    pipeline.placement.can_move = can_move
    moved = []
    pipeline.placement.seconds_of_move = lambda num_blocks: moved.append(num_blocks) or move_s
    recovery_outcome = SimpleNamespace(devices=devices, segments=THREE.segments())
    # Device 1 has a TEB less, which takes 5 s: a step gains so much.
    assert recovery.relief_pays({1: 5.0}, recovery_outcome, steps_left) is pays
    assert moved == ([3] if can_move else [])


def test_no_relief_where_the_other_devices_cannot_hold_the_tebs(pipeline):
    recovery, _ = begun(pipeline)
    pipeline.pool.lost = {0: KILLED, 2: KILLED}
    pipeline.placement.seconds_of_move = lambda num_blocks: 0.0
    assert recovery.relief_pays({1: 5.0}, None, 3) is False


def test_devices_that_are_absent_at_the_start_are_recorded_in_the_first_round_alone(pipeline):
    faults = RoundFaults(7)
    recovery = Recovery(pipeline, faults, absent=(2,))
    pipeline.pool.lost = {2: KILLED}
    faults.begin_round(1)
    recovery.begin_round(THREE, LEAN, 0.0)
    assert records(faults) == [("device", 2, False)] and 2 not in recovery.plan.devices
    assert "its machine was not there when the control unit started" in faults.records[0].reason
    faults.begin_round(2)
    recovery.begin_round(THREE, LEAN, 0.0)
    assert records(faults) == []
