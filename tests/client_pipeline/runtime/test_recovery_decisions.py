"""What is decided when a device is lost: who is given up, what is recorded, and whether the round can go on."""

import time
from types import SimpleNamespace

import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime import recovery as recovery_module
from client_pipeline.runtime.faults import FROZEN, KILLED, PARTED, DeviceFault, LostRound
from client_pipeline.runtime.recovery import Recovery
from client_pipeline.runtime.replanning import ProportionalReplan, equal_devices
from helpers.fake_pipeline import FakePipeline

THREE = ClusterPlan(delta=(1, 2, 1), order=(0, 1, 2), m=4, schedule="1f1b")
LEAN = ProportionalReplan(speed=(1.0,) * 3, capacity=(2,) * 3)
"""Two devices hold the four TEBs, one does not."""


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.setattr(recovery_module, "_LOOK_S", 0.001)
    return FakePipeline()


def begun(pipeline, plan=THREE, replan=LEAN, step=2, replayable=True, fault_began=lambda device: None):
    recovery = Recovery(pipeline, 7, fault_began)
    recovery.begin_round(5, plan, replan, 3.5)
    recovery.begin_step(step, replayable)
    pipeline.asked.clear()
    return recovery


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


def records(recovery):
    return [(r.kind, r.device, r.recovered) for r in recovery.all_records]


@pytest.mark.parametrize(("kind", "recorded"), [(KILLED, "device"), (FROZEN, "freeze")])
def test_a_lost_device_is_recorded_and_the_action_runs_again_on_the_others(pipeline, kind, recorded):
    recovery = begun(pipeline)
    pipeline.kill(1, kind=kind)
    pipeline.restored_by_plan = 640
    action = Action(DeviceFault("device 1: gone\nand a trace", kind, (1,)))
    assert recovery.run(action, action.again) == "done"
    assert action.calls == ["action", "again", "action"]
    [plan] = pipeline.plans
    assert plan == recovery.plan and plan.devices == [0, 2] and sum(plan.delta) == 4
    assert (plan.m, plan.schedule) == (4, "1f1b")
    assert pipeline.asked == ["give up silent", (plan, 3.5)]
    [record] = recovery.all_records
    assert (record.kind, record.cluster, record.device, record.round, record.step) == (recorded, 7, 1, 5, 2)
    assert (record.recovered, record.reason, record.bytes) == (False, "device 1: gone", 640)


def test_a_device_that_was_lost_before_is_not_recorded_again(pipeline):
    recovery = begun(pipeline)
    pipeline.kill(0)
    recovery.run(Action(DeviceFault("device 0 ended", KILLED, (0,))))
    pipeline.kill(1)
    with pytest.raises(LostRound):  # device 2 alone is left
        recovery.run(Action(DeviceFault("device 1 ended", KILLED, (1,))))
    assert [device for _, device, _ in records(recovery)] == [0, 1]


def test_two_that_are_lost_at_once_each_have_a_record_of_their_own_kind(pipeline):
    recovery = begun(pipeline, replan=equal_devices(3, 4))
    pipeline.kill(2)
    pipeline.kill(0, kind=FROZEN)
    assert recovery.run(Action(DeviceFault("device 2 ended", KILLED, (2,)))) == "done"
    assert records(recovery) == [("freeze", 0, False), ("device", 2, False)]
    assert recovery.plan.delta == (0, 4, 0)


def test_one_that_is_back_before_it_is_recorded_is_recorded_all_the_same(pipeline):
    recovery = begun(pipeline)
    pipeline.kill(0, 1)
    pipeline.returns_after[1] = 1
    assert recovery.run(Action(DeviceFault("device 0 ended", KILLED, (0,)))) == "done"
    assert records(recovery) == [("device", 0, False), ("device", 1, False)]
    assert recovery.plan.devices == [1, 2]


def test_one_that_the_plan_does_not_need_is_lost_without_a_record(pipeline):
    recovery = begun(pipeline, plan=ClusterPlan(delta=(2, 2, 0), order=(0, 1), m=4))
    pipeline.kill(1, 2)
    with pytest.raises(LostRound, match="2 TEBs, 4 are needed"):
        recovery.run(Action(DeviceFault("device 1 ended", KILLED, (1,))))
    assert records(recovery) == [("device", 1, False)]


def test_one_that_answers_again_by_now_is_recorded_all_the_same_and_kept(pipeline):
    recovery = begun(pipeline)
    assert recovery.run(Action(DeviceFault("device 1: no answer", FROZEN, (1,)))) == "done"
    assert records(recovery) == [("freeze", 1, False)]
    assert recovery.plan == THREE


def test_devices_that_lose_each_other_are_all_kept_three_times_in_a_row(pipeline):
    recovery = begun(pipeline)
    lost = [DeviceFault(f"number {i}", PARTED) for i in range(3)]
    assert recovery.run(Action(*lost)) == "done"
    assert recovery.plan == THREE
    assert records(recovery) == [("link", None, False)] * 3
    recovery = begun(pipeline)
    with pytest.raises(DeviceFault, match="number 3"):
        recovery.run(Action(*[DeviceFault(f"number {i}", PARTED) for i in range(4)]))
    # A loss between them begins the count anew.
    recovery = begun(pipeline)
    between = DeviceFault("device 0: no answer", FROZEN, (0,))
    assert recovery.run(Action(*lost, between, *lost)) == "done"


def test_without_a_copy_of_the_step_before_the_round_is_lost_and_says_why(pipeline):
    recovery = begun(pipeline, step=3, replayable=False)
    pipeline.kill(1)
    action = Action(DeviceFault("device 1: its process ended", KILLED, (1,)))
    reason = "device 1: its process ended; runtime.snapshots = round keeps no copy of step 2: the round is lost"
    with pytest.raises(LostRound, match=reason):
        recovery.run(action, action.again)
    assert action.calls == ["action"] and pipeline.plans == []
    [record] = recovery.end_round(recovered=False)
    assert (record.kind, record.device, record.step, record.recovered) == ("device", 1, 3, False)
    # The next round can be played from its beginning.
    recovery.begin_round(6, THREE, LEAN, 0.0)
    assert recovery.run(Action(DeviceFault("device 1: again", KILLED, (1,)))) == "done"


def test_too_few_devices_lose_the_round_unless_one_is_on_its_way(pipeline):
    recovery = begun(pipeline)
    pipeline.kill(0, 1)
    fault = DeviceFault("two ended", KILLED, (0, 1))
    with pytest.raises(LostRound, match=r"devices \[2\] are left and hold 2 TEBs, 4 are needed"):
        recovery.run(Action(fault))
    pipeline.pool.lost.clear()
    pipeline.dead.clear()
    recovery = begun(pipeline)
    pipeline.kill(0, 1)
    pipeline.returns_after = {1: 3}
    assert recovery.run(Action(fault)) == "done"
    assert recovery.plan.devices == [1, 2]
    assert records(recovery) == [("joined", 1, True), ("device", 0, False), ("device", 1, False)]


def test_who_is_waited_for_is_waited_for_as_long_as_a_start_takes_and_no_longer_than_the_timeout(pipeline, monkeypatch):
    # A clock that goes on by a second with each look.
    clock = [0.0]
    monkeypatch.setattr(recovery_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(recovery_module.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 1.0))
    for patience, timeout, waited in ((4.0, 100.0, 12.0), (4.0, 5.0, 5.0)):
        pipeline.pool.patience_s, pipeline.pool.runtime.timeout = patience, timeout
        recovery = begun(pipeline)
        pipeline.kill(0, 1)
        start = clock[0]
        with pytest.raises(LostRound):
            recovery.run(Action(DeviceFault("two ended", KILLED, (0, 1))))
        assert clock[0] - start == waited + 1.0
        pipeline.pool.lost.clear()
        pipeline.dead.clear()


def test_a_fault_while_a_plan_is_applied_is_one_like_any_other(pipeline):
    recovery = begun(pipeline)
    pipeline.kill(1)
    pipeline.fails = [DeviceFault("device 1: joining", KILLED, (1,))]
    recovery.use(THREE)
    assert [plan.devices for plan in pipeline.plans] == [[0, 1, 2], [0, 2], [0, 2]]
    assert records(recovery) == [("device", 1, False)]


def test_the_first_finished_micro_batch_ends_a_fault_and_says_how_long_it_took(pipeline):
    injected = {}
    recovery = begun(pipeline, fault_began=injected.get)
    pipeline.deadline.waited_s = 20.0
    recovery.run(Action(DeviceFault("device 0", FROZEN, (0,)), DeviceFault("lost", PARTED)))
    injected[1] = time.monotonic() - 500.0
    recovery.run(Action(DeviceFault("device 1", FROZEN, (1,))))
    recovery.finished_micro_batch()
    recovery.finished_micro_batch()
    # From the last sign of progress, or from when the fault was put in, where that is known.
    assert [r.seconds for r in recovery.records] == [pytest.approx(s, abs=5.0) for s in (20.0, 20.0, 500.0)]
    assert all(r.recovered for r in recovery.all_records)
    recovery.run(Action(DeviceFault("device 2", FROZEN, (2,))))
    ended = recovery.end_round(recovered=False)
    assert [r.recovered for r in ended] == [True, True, True, False]
    assert ended[3].seconds is None
    assert recovery.end_round(recovered=True) == []


def test_a_round_begins_with_who_is_there_and_records_who_was_absent_or_is_back(pipeline):
    recovery = Recovery(pipeline, 7, absent=(1,))
    pipeline.pool.lost = {1: KILLED, 2: FROZEN}
    pipeline.returns_after = {2: 1}
    recovery.begin_round(5, THREE, LEAN, 3.5)
    assert pipeline.asked == ["deadline", (recovery.plan, 3.5)]
    assert recovery.plan.devices == [0, 2]
    assert records(recovery) == [("joined", 2, True), ("device", 1, False)]
    assert "not there when the control unit started" in recovery.all_records[1].reason
    assert {(r.round, r.step) for r in recovery.all_records} == {(5, 0)}
    assert recovery.end_round(recovered=True)[1].recovered
    # It is absent once; the plan of a round is taken as it is where all its devices are there.
    recovery.begin_round(6, THREE, LEAN, 0.0)
    assert recovery.all_records == [] and recovery.plan.devices == [0, 2]
    pipeline.pool.lost.clear()
    recovery.begin_round(7, THREE, LEAN, 0.0)
    assert recovery.plan == THREE


def test_less_for_slow_devices_pays_where_they_are_waited_for_longer_than_tebs_move(pipeline):
    recovery = begun(pipeline, replan=equal_devices(3, 4))
    devices = {segment.device: SimpleNamespace(busy_s=1.0) for segment in THREE.segments()}
    devices[1].busy_s = 9.0
    outcome = SimpleNamespace(devices=devices, segments=THREE.segments())
    moves = []
    pipeline.placement.seconds_of_move = lambda num_blocks: moves.append(num_blocks) or 3.0
    assert recovery.relief_pays({1: 9.0}, outcome, 3)
    assert not recovery.relief_pays({1: 9.0}, outcome, 0)
    assert recovery.all_records == [] and min(moves) >= 0
    # Where those who are left cannot hold the TEBs there is nothing to gain.
    pipeline.pool.lost = {0: KILLED, 1: KILLED, 2: KILLED}
    assert not recovery.relief_pays({1: 9.0}, outcome, 3)


def test_slow_devices_get_less_and_are_recorded_once(pipeline):
    recovery = begun(pipeline, replan=equal_devices(3, 4))
    pipeline.moved_by_plan = 33
    recovery.unburden({1: 8.0, 0: 2.0}, recorded=())
    assert [(r.kind, r.device, r.bytes) for r in recovery.all_records] == [("slow", 0, 33), ("slow", 1, 33)]
    assert recovery.all_records[1].reason == "8.0 times slower than usual"
    assert recovery.plan.delta == (1, 1, 2)
    recovery.unburden({1: 9.0}, recorded=(0, 1))
    assert len(recovery.all_records) == 2
    # Who is lost is not planned with, however fast it was.
    pipeline.pool.lost = {2: KILLED}
    recovery.unburden({0: 9.0}, recorded=(0, 1))
    assert recovery.plan.delta[2] == 0
