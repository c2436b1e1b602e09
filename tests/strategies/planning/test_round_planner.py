"""Planning a run's rounds: who is left out, what moves the queues, and that a continued run plans the same."""

import dataclasses
import json
import math

import numpy as np
import pytest

from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.event_simulator import simulate_pipeline
from strategies.baselines.titanic import Titanic
from strategies.baselines.vanilla_fl import VanillaFL, whole_model_times, whole_model_work
from strategies.dssda.paper import power_control
from strategies.dssda.paper.joint_power import JointPowers
from strategies.planning.plan_demands import plan_times
from strategies.planning.planner import InfeasibleRound, RoundPlanner
from strategies.planning.policies import DSSDA, POLICIES, make_policy
from strategies.planning.segment_rules import even_choice, proportional_choice

FRESH = [math.inf] * 8


def planner(name="dssda", scenario="table2-contended"):
    return RoundPlanner(load_scenario(scenario), make_policy(name))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fixed"])
def test_clusters_that_are_not_there_are_not_planned(name):
    absent = {1: "its node is not connected", 6: "its node is not connected"}
    decision = planner(name).plan(1, FRESH, absent)
    assert sum(decision.selected) == 4 and not decision.selected[1] and not decision.selected[6]
    assert decision.left_out == absent
    assert [plan.selected for plan in decision.plans] == decision.selected
    assert all(sum(plan.delta) == 12 for plan in decision.plans)


def test_a_cluster_without_any_plan_is_left_out_with_the_reason():
    scenario = load_scenario("table2")
    weak = tuple(dataclasses.replace(device, memory=0.3e9) for device in scenario.clusters[2])
    weaker = dataclasses.replace(scenario, clusters=(*scenario.clusters[:2], weak))
    decision = RoundPlanner(weaker, make_policy("dssda")).plan(1, FRESH[:3])
    assert decision.selected == [True, True, False]
    assert decision.left_out[2].startswith("C7 needs 12, has 0")
    nobody = dataclasses.replace(scenario, clusters=(weak, weak, weak))
    decision = RoundPlanner(nobody, make_policy("dssda")).plan(1, FRESH[:3])
    assert not any(decision.selected) and decision.left_out.keys() == {0, 1, 2}
    assert "round 1: no cluster can train: cluster 0: C7 needs 12" in str(InfeasibleRound(1, decision.left_out))


def test_the_queues_move_once_by_what_the_round_really_had():
    ours = planner()
    decision = ours.plan(1, FRESH)
    [first, *others] = [n for n, chosen in enumerate(decision.selected) if chosen]
    gamma = ours.settle(decision, trained=set(others))
    silent = planner().settle(decision, trained=set())
    assert gamma[first] == silent[first]
    assert all(gamma[n] != silent[n] for n in others)
    expected = np.maximum(gamma - ours.scenario.planner.gamma_max, 0)
    np.testing.assert_array_equal(ours.queues.virtual, expected)
    # Settling the same decision again does not move them twice.
    ours.settle(decision, trained=set(others))
    np.testing.assert_array_equal(ours.queues.virtual, expected)


def test_a_restored_planner_plans_as_one_that_never_stopped():
    ours, theirs = planner(), planner()
    for number in range(1, 6):
        ours.settle(ours.plan(number, FRESH))
    theirs.restore(json.loads(json.dumps(ours.state())))
    assert ours.plan(6, FRESH).plans == theirs.plan(6, FRESH).plans


@pytest.mark.parametrize(("scenario", "energy_queue"), [("table2-contended", False), ("physical", True)])
def test_powers_come_from_convex_programs_and_cost_what_the_exact_ones_cost(scenario, energy_queue):
    ours, exact = planner(scenario=scenario), RoundPlanner(load_scenario(scenario), DSSDA(), power_control="exact")
    seen = []
    for number in range(1, 9):
        exact.restore(ours.state())
        decision = ours.plan(number, FRESH[: ours.scenario.num_clusters])
        control = decision.power_control
        assert control.used == "sca" and control.status == "converged" and control.residual <= 1e-7
        assert [c.cluster for c in control.clusters] == [n for n, chosen in enumerate(decision.selected) if chosen]
        assert all(decision.answer.clusters[c.cluster].power_w == c.sca_w for c in control.clusters)
        assert decision.answer.status == "optimal" and decision.answer.gap <= 1e-6
        by_bisection = exact.plan(number, FRESH[: ours.scenario.num_clusters])
        assert by_bisection.power_control is None
        assert decision.answer.objective == pytest.approx(by_bisection.answer.objective, rel=1e-6)
        assert control.gap == pytest.approx(decision.answer.objective / by_bisection.answer.objective - 1, abs=1e-12)
        assert [p.delta for p in decision.plans] == [p.delta for p in by_bisection.plans]
        seen.append(control.iterations)
        ours.settle(decision)
    # Only an energy term needs more than one program.
    assert max(seen) > 1 if energy_queue else set(seen) == {1}


@pytest.mark.parametrize(
    ("status", "gap", "dearer", "used"),
    [
        ("optimal", 0.0, 0.9e-6, "sca"),
        ("optimal", 0.0, 1.1e-6, "exact"),
        ("optimal", 0.6e-6, 0.3e-6, "sca"),
        ("optimal", 0.6e-6, 0.5e-6, "exact"),
        ("optimal", 0.95e-6, 0.1e-6, "exact"),
        ("feasible", 0.3, 0.9e-6, "sca"),
        ("feasible", 0.3, 1.1e-6, "exact"),
    ],
)
def test_what_a_plan_and_its_powers_leave_open_is_bounded_together(status, gap, dearer, used, monkeypatch):
    """An optimal round stays within 1e-6 of its bound: what the plan has used of that, its powers have not."""
    decision = RoundPlanner(load_scenario("table2"), DSSDA(), power_control="exact").plan(1, FRESH[:3])
    instance, exact = decision.instance, decision.answer
    powers = JointPowers(tuple(c.power_w for c in exact.clusters), 1, 0.0, "converged")
    monkeypatch.setattr(power_control, "solve_joint_powers", lambda instance, matches: powers)
    objective = exact.objective / (1 + dearer)
    answer = dataclasses.replace(exact, status=status, objective=objective, lower_bound=objective * (1 - gap))
    controlled, control = power_control.control_power(instance, answer)
    assert control.gap == pytest.approx(dearer, rel=1e-3) and control.used == used
    if status == "optimal":
        assert controlled.gap <= 1e-6 * (1 + 1e-3)


def test_titanic_gives_tebs_in_proportion_to_speed_within_memory():
    scenario = load_scenario("table2")
    decision = RoundPlanner(scenario, Titanic.own_policy(0)).plan(1, FRESH[:3])
    for n, plan in enumerate(decision.plans):
        devices = decision.instance.device_arrays(n)
        speed, delta = devices.phi * devices.f, np.array(plan.delta)
        assert plan.m == 8 and delta.sum() == 12 and delta.min() >= 1 and delta.max() <= 4
        order = np.argsort(-speed)
        assert all(delta[order][:-1] >= delta[order][1:])
        free = (delta > 1) & (delta < 4)
        quota = 12 * speed / speed.sum()
        assert np.all(np.abs(delta - quota)[free] < 1.5)
    assert even_choice(decision.instance, 0).delta == (2,) * 6
    tight = dataclasses.replace(decision.instance, gamma0=1.4e9)
    assert proportional_choice(tight, 0) is None and even_choice(tight, 0) is None


def test_vanilla_fl_waits_for_its_slowest_device_and_holds_the_whole_model_everywhere():
    decision = RoundPlanner(load_scenario("table2"), VanillaFL.own_policy(0)).plan(1, FRESH[:3])
    instance, devices = decision.instance, decision.instance.device_arrays(1)
    work = whole_model_work(instance, 1, decision.plans[1])
    flop = 12 * (64 / 6 * 2e9 + 2e9)
    assert work.pipeline_s == pytest.approx(max(flop / (devices.phi * devices.f)))
    np.testing.assert_allclose(work.device_s, flop / (devices.phi * devices.f))
    np.testing.assert_allclose(work.device_energy_j, 1e-27 * flop * devices.f**2 / devices.phi)
    np.testing.assert_allclose(work.device_memory_bytes, 12 * 0.375e9)
    assert decision.plans[1].m == 1 and max(decision.plans[1].delta) == 12
    # A paced cluster takes what the K devices of the model take, not what its only stage would by itself.
    times = whole_model_times(instance, 1, decision.plans[1])
    assert simulate_pipeline("gpipe", *times).makespan == pytest.approx(work.pipeline_s)
    assert simulate_pipeline("gpipe", *plan_times(instance, 1, decision.plans[1])).makespan < 0.6 * work.pipeline_s
