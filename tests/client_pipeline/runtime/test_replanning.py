"""Plans for the devices that are left: memory is kept, and so are the micro-batches."""

import itertools
import random
from dataclasses import replace

import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit.speed import SpeedWatch
from client_pipeline.runtime.devices.device import StepReport
from client_pipeline.runtime.stage.stage import DoneAction
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.replanning import NoPlan, ProportionalReplan, equal_devices
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.plan_demands import memory_violations
from strategies.planning.replan import ScheduledReplan

PLAN = ClusterPlan(delta=(2, 0, 1, 3), order=(3, 0, 2), m=5, schedule="1f1b", channel=1, power_w=0.25)


@pytest.mark.parametrize("capacity", [(6, 6, 6, 6), (2, 2, 2, 2), (1, 3, 0, 4)])
def test_every_set_of_survivors_gets_a_plan_that_fits_or_is_told_why_not(capacity):
    replan = ProportionalReplan(speed=(1.0, 4.0, 2.0, 3.0), capacity=capacity)
    for size in range(1, 5):
        for usable in itertools.combinations(range(4), size):
            if sum(capacity[k] for k in usable) < 6:
                with pytest.raises(NoPlan, match=r"hold \d+ TEBs, 6 are needed \(C7\)"):
                    replan(PLAN, usable, {})
                continue
            plan = replan(PLAN, usable, {})
            assert sum(plan.delta) == 6 and set(plan.devices) <= set(usable)
            assert all(count <= room for count, room in zip(plan.delta, capacity, strict=True))
            assert (plan.m, plan.schedule, plan.channel, plan.power_w) == (5, "1f1b", 1, 0.25)
            plan.check(num_blocks=6, batch_size=8, num_devices=4)


def test_shares_follow_the_speed_and_a_slow_device_gets_less():
    replan = ProportionalReplan(speed=(1.0, 1.0, 1.0, 3.0), capacity=(6, 6, 6, 6))
    assert replan(PLAN, (0, 1, 3), {}).delta == (1, 1, 0, 4)
    assert replan(PLAN, (0, 1, 3), {3: 9.0}).delta == (3, 2, 0, 1)
    # Three segments as before; the slow one is the one that is not needed.
    assert replan(PLAN, (0, 1, 2, 3), {3: 9.0}).delta == (2, 2, 2, 0)
    assert equal_devices(4, 6)(PLAN, (1, 2), {}).delta == (0, 3, 3, 0)


def test_a_device_that_holds_one_teb_gets_one_and_one_that_holds_none_gets_none():
    """Devices of capacity 1 once could be passed over without a test that noticed."""
    plan = ClusterPlan(delta=(6, 0, 0, 0), order=(0,), m=5)
    assert ProportionalReplan(speed=(1.0,) * 4, capacity=(1, 1, 1, 3))(plan, range(4), {}).delta == (1, 1, 1, 3)
    assert ProportionalReplan(speed=(9.0, 1.0, 9.0, 1.0), capacity=(1, 5, 0, 1))(plan, range(4), {}).delta == (
        1,
        5,
        0,
        0,
    )
    with pytest.raises(NoPlan, match="hold 5 TEBs, 6 are needed"):
        ProportionalReplan(speed=(1.0,) * 4, capacity=(1, 1, 0, 3))(plan, range(4), {})


def test_a_device_that_holds_none_is_no_segment_however_fast_it_is():
    replan = ProportionalReplan(speed=(9.0, 2.0, 2.0, 2.0), capacity=(0, 6, 6, 6))
    plan = replan(PLAN, range(4), {})
    assert (plan.delta, plan.order) == ((0, 2, 2, 2), (1, 2, 3))


def test_shares_are_as_near_to_the_speeds_as_whole_tebs_can_be():
    """Every other split of as many TEBs misses some device's share by more, in sum of squares."""
    generator = random.Random(4)
    for _ in range(60):
        speed = tuple(generator.uniform(1.0, 4.0) for _ in range(3))
        plan = ClusterPlan(delta=(3, 3, 3), order=(0, 1, 2), m=5)
        found = ProportionalReplan(speed=speed, capacity=(9, 9, 9))(plan, range(3), {}).delta
        shares = [9 * v / sum(speed) for v in speed]

        def missed(delta, shares=shares):
            return sum((part - share) ** 2 for part, share in zip(delta, shares, strict=True))

        splits = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a)]
        assert missed(found) <= min(map(missed, splits)) + 1e-9


@pytest.fixture(scope="module")
def scenario():
    return load_scenario("table2")


def test_the_segment_scheduler_plans_for_those_who_are_left(scenario):
    num_blocks, devices = scenario.planner.num_blocks, len(scenario.clusters[0])
    plan = ClusterPlan(delta=(2,) * 6, order=tuple(range(6)), m=7)
    replan = ScheduledReplan(scenario=scenario, cluster=1, round=3)
    whole = replan(plan, range(devices), {})
    lost = whole.devices[0]
    left = [k for k in range(devices) if k != lost]
    found = replan(plan, left, {})
    assert found.m == 7 and lost not in found.devices
    found.check(
        num_blocks=num_blocks,
        batch_size=64,
        num_devices=devices,
        memory=[d.memory for d in scenario.clusters[1]],
        block_memory=scenario.block_memory,
    )
    slowed = replan(plan, range(devices), {whole.devices[0]: 10.0})
    assert slowed.delta[lost] < whole.delta[lost]


def test_without_room_for_all_tebs_the_scheduler_says_so_unless_memory_is_waived(scenario):
    plan = ClusterPlan(delta=(12, 0, 0, 0, 0, 0), order=(0,), m=1)
    with pytest.raises(NoPlan, match="12 are needed"):
        ScheduledReplan(scenario=scenario, cluster=0, round=1)(plan, [1, 2], {})
    waived = ScheduledReplan(scenario=scenario, cluster=0, round=1, any_memory=True)
    assert sum(waived(plan, [1, 2], {}).delta) == 12


def test_those_who_are_left_hold_more_under_a_schedule_that_keeps_less(scenario):
    mostly_activations = replace(scenario, costs=replace(scenario.costs, activation_memory=0.3e9))
    replan = ScheduledReplan(scenario=mostly_activations, cluster=1, round=3)
    plan = ClusterPlan(delta=(2,) * 6, order=tuple(range(6)), m=16)
    instance = round_instance(mostly_activations, NetworkTrace(mostly_activations).round(3), Queues.empty(3))
    only_there = 0
    for left in range(1, 7):
        found = {}
        for schedule in ("gpipe", "1f1b"):
            try:
                found[schedule] = replan(replace(plan, schedule=schedule), range(left), {})
            except NoPlan:
                continue
            assert found[schedule].schedule == schedule
            assert memory_violations(instance, 1, found[schedule]) == []
        only_there += "gpipe" not in found and "1f1b" in found
        assert "gpipe" not in found or "1f1b" in found
    assert only_there


def report(seconds, work=100.0):
    return StepReport(actions=[DoneAction("F", 0, 0.0, seconds)], norm_sq=0.0, work=work)


def steps(watch, *times):
    return [watch.observe({k: report(t) for k, t in enumerate(step)}) for step in times]


def test_a_device_is_slow_when_it_falls_behind_the_others_twice_and_behind_its_own_past():
    watch = SpeedWatch()
    usual = [(1.0, 2.0, 1.0)] * 4  # device 1 is slow by nature
    assert not any(steps(watch, *usual))
    assert not any(steps(watch, (10.0, 20.0, 10.0), (10.0, 20.0, 10.0)))  # the machine, or the batch
    assert not any(steps(watch, (1.0, 20.0, 1.0), (1.0, 2.0, 1.0)))  # once
    first, second = steps(watch, (1.0, 20.0, 1.0), (1.0, 20.0, 1.0))
    assert not first and second.keys() == {1} and second[1] == pytest.approx(10.0, rel=0.2)


def test_who_was_slow_in_the_last_round_is_found_after_one_step_of_this():
    watch = SpeedWatch()
    steps(watch, *[(1.0, 1.0)] * 4)
    watch.begin_round({1: 8.0})
    assert steps(watch, (1.0, 9.0))[0].keys() == {1}
