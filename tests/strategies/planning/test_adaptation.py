"""Plans that follow what was measured: when, why, and when not; and a run that goes on as if it had not stopped."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.schedules import SCHEDULES
from helpers.repository import ROOT
from strategies.estimation.cluster_times import DEVICE, INLET, LINK, UPLOAD
from strategies.estimation.measured_network import MeasuredNetwork, declared_times
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA

sys.path.insert(0, str(Path(ROOT) / "benchmarks"))

import adaptation_stories as bench
from best_plans import best_plans
from synthetic_adaptation import SyntheticCluster, synthetic


def planner_of(network=None):
    return RoundPlanner(bench.scenario(), DSSDA(), adaptation=Adaptation(network or MeasuredNetwork(1)))


def play(planner, cluster, story, rounds):
    """Plan and learn; returns the plans, and the changes with their rounds."""
    plans, changes = [], []
    for number in rounds:
        decision = planner.plan(number, [1.0])
        changes += [(number, change) for change in planner.adaptation.changes]
        plans.append(decision.plans[0])
        report = cluster.train(decision.declared, decision.plans[0], story(number))
        planner.adaptation.observe(number, 0, report, decision.declared, None)
    return plans, changes


def test_before_anything_is_measured_the_scenario_plans():
    plain = RoundPlanner(bench.scenario(), DSSDA()).plan(1, [1.0])
    measured = planner_of().plan(1, [1.0])
    assert measured.instance == measured.declared == plain.instance
    assert measured.plans == plain.plans


def test_the_schedule_is_the_one_of_least_predicted_time():
    network = MeasuredNetwork(1)
    planner = RoundPlanner(bench.scenario(), DSSDA(), adaptation=Adaptation(network), schedule="auto")
    decision = planner.plan(1, [1.0])
    [plan] = decision.plans
    times = {s: network.predict(decision.instance, 0, replace(plan, schedule=s)).pipeline_s for s in SCHEDULES}
    assert times[plan.schedule] == min(times.values())
    assert times["zb-h1"] < times["1f1b"]


def test_measured_times_are_those_of_the_problem():
    declared = planner_of().plan(1, [1.0]).declared
    network = bench.true_network(declared, bench.Truth())
    times = declared_times(network.instance(declared), 0)
    for key, (fixed_s, sample_s) in bench.true_times(declared, bench.Truth()).items():
        if key[0] in (DEVICE, LINK):
            assert times[key] == pytest.approx((fixed_s, sample_s), rel=1e-6)


def test_what_one_cluster_reports_changes_nothing_for_another_that_was_measured():
    scenario = load_scenario("default")
    declared = RoundPlanner(scenario, DSSDA()).plan(1, [1.0] * scenario.num_clusters).declared
    planned = []
    for lie in (1.0, 1e6, 1e-6):
        network = MeasuredNetwork(declared.num_clusters)
        for n, factor in ((0, 1.0), (1, lie)):
            for key, (fixed_s, sample_s) in declared_times(declared, n).items():
                network.clusters[n].believe(key, factor * fixed_s, factor * sample_s)
            network.clusters[n].believe((UPLOAD, 0), 2.0 * factor, 0.0)
        planned.append(network.instance(declared).clusters)
    honest, slower, faster = planned
    assert honest[0] == slower[0] == faster[0]
    assert honest[1] != slower[1] != faster[1]


def test_a_device_that_becomes_slower_gives_its_tebs_away_and_the_plan_says_why():
    planner = planner_of()
    cluster = SyntheticCluster(0.01, 0)
    before, _ = play(planner, cluster, bench.steady, range(1, 13))

    def slower(number):
        truth = bench.Truth()
        truth.teb[0] *= 3.0
        return truth

    after, changes = play(planner, cluster, slower, range(13, 18))
    taken = [(number, change) for number, change in changes if change.taken]
    # Two rounds tell that it is no outlier.
    assert [number for number, _ in taken] == [15]
    assert after[-1].delta[0] < before[-1].delta[0]
    assert "a TEB on device 0 takes 3 times as long" in taken[0][1].reason
    assert taken[0][1].gain_s > taken[0][1].move_s > 0


def test_rounds_that_nobody_runs_keep_a_plan_that_was_taken():
    planner = planner_of()
    cluster = SyntheticCluster(0.01, 0)

    def slower(number):
        truth = bench.Truth()
        truth.teb[0] *= 3.0 if number > 12 else 1.0
        return truth

    before, _ = play(planner, cluster, slower, range(1, 15))
    planner.adaptation.tries = False
    ahead = []
    for number in range(15, 60):
        [plan] = planner.plan(number, [1.0]).plans
        planner.adaptation.assume({0: plan})
        ahead.append(plan)
    assert ahead[0].delta[0] < before[-1].delta[0]
    assert all((plan.delta, plan.m) == (ahead[0].delta, ahead[0].m) for plan in ahead)


def test_a_better_plan_whose_move_costs_more_than_it_saves_is_not_taken():
    planner = planner_of()
    cluster = SyntheticCluster(0.01, 0)
    plans, _ = play(planner, cluster, bench.steady, range(1, 13))
    times = planner.adaptation.network.clusters[0]
    # A hundred seconds for every byte.
    times.believe(("move", 0), 0.0, 100.0)

    def slower(number):
        truth = bench.Truth()
        truth.teb[0] *= 3.0
        return truth

    after, changes = play(planner, cluster, slower, range(13, 18))
    assert {plan.delta for plan in after} == {plans[-1].delta}
    assert changes and not any(change.taken for _, change in changes)
    assert "not worth it" in changes[-1][1].reason


def test_a_lost_device_is_left_out_until_it_is_back():
    planner = planner_of()
    cluster = SyntheticCluster(0.01, 0)
    first, _ = play(planner, cluster, bench.steady, range(1, 9))
    gone, changes = play(planner, cluster, lambda _: bench.Truth(away=frozenset({1})), range(9, 14))
    assert first[-1].delta[1] > 0 and [plan.delta[1] for plan in gone[1:]] == [0] * 4
    assert any("device 1 was lost" in change.reason for _, change in changes)
    back, changes = play(planner, cluster, bench.steady, range(14, 18))
    assert back[-1].delta[1] > 0
    assert any("device 1 is back" in change.reason for _, change in changes)


def test_devices_that_are_needed_are_waited_for_even_if_they_are_lost():
    planner = planner_of()
    declared = planner.plan(1, [1.0]).declared
    network = planner.adaptation.network
    network.clusters[0].believe((DEVICE, 0), 0.1, 0.1)
    network.clusters[0].away = {0, 1, 2, 3}
    assert all(device.mem > 0 for device in network.instance(declared).clusters[0].devices)


def test_a_resumed_run_plans_as_the_undisturbed_one():
    planner, cluster = planner_of(), SyntheticCluster(0.02, 5)
    play(planner, cluster, bench.slower_device, range(1, 32))
    state = json.loads(json.dumps(planner.state()))
    resumed = planner_of()
    resumed.restore(state)
    plans, records = [], []
    for other in (planner, resumed):
        twin = SyntheticCluster(0.02, 6)
        plans.append(play(other, twin, bench.slower_device, range(32, 38))[0])
        records.append(other.state())
    assert plans[0] == plans[1] and records[0] == records[1]


def test_uploads_of_a_deployment_take_what_they_took_on_every_channel():
    network = MeasuredNetwork(1)
    declared = planner_of().plan(1, [1.0]).declared
    network.clusters[0].believe((UPLOAD, 0), 7.5, 0.0)
    instance = network.instance(declared)
    up = instance.clusters[0].up
    assert up.t_bits / instance.uplink_rate(0, up.Pmax, 0) == pytest.approx(7.5)


@pytest.mark.slow
def test_the_benchmarks_claims_hold():
    rows = {row["story"]: row for row in synthetic(1, 0.02, lambda text: None, judged_every=8)}
    assert rows["steady noise"]["false_replans"] == 0
    for row in rows.values():
        assert row["prediction_error"] < 0.03
        assert row["regret_mean"] < 0.05
        assert row["rounds_until_found"] is None or row["rounds_until_found"] <= 2


def test_a_slow_way_to_the_first_device_is_part_of_the_prediction_until_nobody_waits_for_it():
    planner, cluster = planner_of(), SyntheticCluster(0.01, 0)
    plans, _ = play(planner, cluster, bench.steady, range(1, 8))
    plan, network = plans[-1], planner.adaptation.network
    first, times = plan.devices[0], network.clusters[0]
    instance = planner.plan(8, [1.0]).instance
    before_s = network.predict(instance, 0, plan).pipeline_s
    size = instance.b // plan.m
    for number in range(8, 14):
        decision = planner.plan(number, [1.0])
        report = cluster.train(decision.declared, plan, bench.Truth())
        report["measured"]["inlets"][str(first)] = [[size, 8, 10.0 * before_s / plan.m]]
        planner.adaptation.observe(number, 0, report, decision.declared, None)
    # As many inputs but one, each ten times as long after the one before as a micro-batch took.
    assert times[INLET, first].seconds(size) == pytest.approx(10.0 * before_s / plan.m, rel=0.05)
    assert network.predict(instance, 0, plan).pipeline_s > 8.0 * before_s
    assert times.inlet(99) is times.inlet(first)
    for number in range(14, 60):
        decision = planner.plan(number, [1.0])
        report = cluster.train(decision.declared, plan, bench.Truth())
        planner.adaptation.observe(number, 0, report, decision.declared, None)
    assert network.predict(instance, 0, plan).pipeline_s == pytest.approx(before_s, rel=0.1)


def test_a_device_that_is_quick_only_while_it_is_idle_does_not_come_and_go():
    planner = planner_of()

    class Quick(SyntheticCluster):
        def train(self, declared, plan, truth):
            report = super().train(declared, plan, truth)
            spare = report["measured"]["spare"]
            report["measured"]["spare"] = {k: [[n, w, s / 8] for n, w, s in times] for k, times in spare.items()}
            return report

    cluster = Quick(0.01, 0)

    def useless(number):
        truth = bench.Truth()
        truth.teb[4] *= 2.0
        return truth

    plans, changes = play(planner, cluster, useless, range(1, 60))
    # It is given work once at most; what it took there is what counts from then on.
    working = [bool(plan.delta[4]) for plan in plans]
    began = [after for before, after in zip(working, working[1:], strict=False) if after and not before]
    assert len(began) <= 1
    assert not plans[-1].delta[4]


def test_what_the_event_simulator_is_off_by_is_learned_and_begins_anew_with_a_change():
    network = MeasuredNetwork(1)
    declared = planner_of().plan(1, [1.0]).declared
    times = network.clusters[0]
    [plan] = best_plans(declared, bench.true_network(declared, bench.Truth()), 1)
    before = network.predict(declared, 0, plan)
    for error in (0.05, 0.07, 0.06):
        times.learn_model_error(1.0, math.exp(error - times.model_error))
    assert times.model_error == pytest.approx(0.06)
    assert network.predict(declared, 0, plan).pipeline_s == pytest.approx(before.pipeline_s * math.exp(0.06))
    # Three times as long is no error of the simulator: the estimators have to find what has changed.
    times.learn_model_error(1.0, 3.0)
    times.learn_model_error(0.0, 3.0)
    assert times.model_error == pytest.approx(0.06)
    restored = MeasuredNetwork(1)
    restored.restore(json.loads(json.dumps(network.to_dict())))
    assert restored.predict(declared, 0, plan) == network.predict(declared, 0, plan)
    for number in range(60):
        times.learn_model_error(1.0, math.exp((-1) ** number * 0.09))
    assert abs(times.model_error - 0.06) < 0.2
