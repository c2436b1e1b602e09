"""Rounds of TEBs that cost differently: plans, virtual time, and what a round's line says of them."""

import dataclasses
import math

import pytest

from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.event_simulator import FUSED, simulate_pipeline
from flower_app.training.round_closer import timeline_of
from strategies.baselines.stock_accounting import stock_record
from strategies.baselines.vanilla_fl import whole_model_work
from strategies.dssda.evaluation import violations
from strategies.planned_strategy import plan_record
from strategies.planning.costs import costs_record, pipeline_work, round_costs
from strategies.planning.dry_run import plan_rounds
from strategies.planning.plan_demands import plan_times
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy
from strategies.planning.replan import ScheduledReplan

SHARES = (0.2,) * 4 + (1.0,) * 4 + (0.5,) * 4


def scenario_with(shares, name="table2", **planner):
    scenario = load_scenario(name)
    costs = dataclasses.replace(scenario.costs, teb_shares=shares)
    return dataclasses.replace(scenario, costs=costs, planner=dataclasses.replace(scenario.planner, **planner))


def decide(scenario, policy="dssda", **options):
    return RoundPlanner(scenario, make_policy(policy), power_control="exact", **options).plan(1, [math.inf] * 3)


@pytest.fixture(scope="module")
def unequal():
    return decide(scenario_with(SHARES))


@pytest.fixture(scope="module")
def equal():
    return decide(scenario_with(()))


def test_a_plan_of_each_teb_is_certified_and_faster_than_that_of_the_costliest(unequal, equal):
    assert unequal.answer.status == "optimal" and unequal.answer.gap <= 1e-6
    assert unequal.answer.objective < equal.answer.objective
    matches = [part.match for part in unequal.answer.clusters]
    assert violations(unequal.instance, matches) == []
    assert all(m.choice.sequence == tuple(plan.devices) for m, plan in zip(matches, unequal.plans, strict=True))
    line = plan_record("dssda", unequal)["teb_costs"]
    assert line == "TEBs cost from 20% of the costliest to all of it; the plan counts each by itself"
    assert "teb_costs" not in plan_record("dssda", equal)


def test_virtual_time_is_that_of_the_tebs_that_each_device_has(unequal):
    for n, part in enumerate(unequal.answer.clusters):
        plan, work = unequal.plans[n], pipeline_work(unequal.instance, n, unequal.plans[n])
        assert work.pipeline_eq15_s == pytest.approx(part.choice.pipeline_s)
        devices, order = unequal.instance.device_arrays(n), plan.devices
        times = plan_times(unequal.instance, n, plan)
        for stage, segment in enumerate(plan.segments()):
            load = math.fsum(SHARES[i] for i in segment.blocks)
            seconds = load * unequal.instance.work(plan.m) / (devices.phi * devices.f)[order[stage]]
            assert sum(times.forward_s[stage] + times.backward_s[stage]) == pytest.approx(plan.m * seconds)
        assert work.pipeline_fused_s == pytest.approx(simulate_pipeline(FUSED, *times).makespan)


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        ("dssda-paper", {}, "policy dssda-paper needs equal TEBs"),
        ("dssda", {"latency": "flowshop"}, 'the exact method for latency = "flowshop" needs equal TEBs'),
    ],
)
def test_where_each_teb_counts_as_the_costliest_the_plan_is_that_of_equal_ones_and_the_rounds_line_says_so(
    policy, changes, reason
):
    scenario = scenario_with(SHARES, **changes)
    unequal, equal = decide(scenario, policy), decide(scenario_with((), **changes), policy)
    assert unequal.answer == equal.answer
    assert plan_record(policy, unequal)["teb_costs"] == (
        f"TEBs cost from 20% of the costliest to all of it; the plan counts each as the costliest: {reason}"
    )
    # Virtual time is of what the devices do, whatever the plan counts.
    virtual, costliest = (round_costs(d.as_declared(), pipeline_work) for d in (unequal, equal))
    assert virtual.latency_s < costliest.latency_s and virtual.energy_j < costliest.energy_j


@pytest.mark.parametrize("policy", ["uniform", "random", "delay-only+optimal"])
def test_plans_by_a_rule_are_scored_by_what_their_devices_do(policy):
    decision = decide(scenario_with(SHARES), policy)
    for n, part in enumerate(decision.answer.clusters):
        if part.selected:
            work = pipeline_work(decision.instance, n, decision.plans[n])
            assert work.pipeline_eq15_s == pytest.approx(part.choice.pipeline_s)


def test_rounds_planned_without_training_count_each_teb():
    [planned] = plan_rounds(scenario_with(SHARES), make_policy("dssda-paper"), 1)
    assert "counts each as the costliest" in planned.teb_costs and not planned.violations
    assert planned.latency_s < planned.answer.latency_s


def test_a_stock_round_and_a_timeline_count_each_teb(unequal):
    plans = dict(enumerate(unequal.plans))
    cheap, dear = (stock_record(scenario_with(shares), 1, plans)["virtual"]["latency_s"] for shares in (SHARES, ()))
    assert cheap < dear
    reports = [{"cluster": n, "plan": plan.to_dict(), "timeline": []} for n, plan in plans.items()]
    scenario = scenario_with(SHARES)
    record = costs_record(unequal, round_costs(unequal, pipeline_work), [0.0] * 3, scenario)
    for entry, line in zip(timeline_of(scenario, 1, reports)["clusters"], record["clusters"], strict=True):
        assert max(event[-1] for event in entry["modelled"]) == pytest.approx(line["pipeline_s"])


def test_the_whole_model_on_one_device_is_the_sum_of_its_tebs(unequal, equal):
    share = sum(SHARES) / len(SHARES)
    of_unequal, of_equal = (whole_model_work(d.instance, 0, d.plans[0]) for d in (unequal, equal))
    assert of_unequal.pipeline_s == pytest.approx(share * of_equal.pipeline_s)


def test_the_devices_that_remain_in_the_middle_of_a_round_have_segments_of_least_time(unequal):
    scenario, plan = scenario_with(SHARES), unequal.plans[0]
    usable = plan.devices[1:]
    found = ScheduledReplan(scenario=scenario, cluster=0, round=1)(plan, usable, {})
    assert set(found.devices) <= set(usable) and sum(found.delta) == 12
    assert found.order != tuple(sorted(found.order, key=lambda k: -scenario.clusters[0][k].speed))
