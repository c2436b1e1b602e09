"""Plans that follow what was measured: when, why, and when not; and a run that goes on as if it had not stopped."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from client_pipeline.runtime.schedules import SCHEDULES
from client_pipeline.system.scenario import load_scenario
from helpers.repository import ROOT
from strategies.estimation.cluster_times import DEVICE, INLET, LINK, OUTLET, UPLOAD
from strategies.estimation.measured_network import MeasuredNetwork, declared_times
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA, make_policy

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
    with pytest.raises(ValueError, match="planner.lookahead: 2 rounds need a policy that weighs the bound"):
        RoundPlanner(bench.scenario(), DSSDA(), adaptation=Adaptation(network), lookahead=2)


def test_measured_times_are_those_of_the_problem():
    declared = planner_of().plan(1, [1.0]).declared
    network = bench.true_network(declared, bench.Truth())
    times = declared_times(network.instance(declared), 0)
    for key, (fixed_s, sample_s) in bench.true_times(declared, bench.Truth()).items():
        if key[0] in (DEVICE, LINK):
            assert times[key] == pytest.approx((fixed_s, sample_s), rel=1e-6)


def test_who_was_never_measured_is_as_much_slower_than_declared_as_the_others():
    network = MeasuredNetwork(1)
    declared = planner_of().plan(1, [1.0]).declared
    believed = declared_times(declared, 0)
    for k, factor in enumerate((2.0, 3.0, 4.0)):
        network.clusters[0].believe((DEVICE, k), *(factor * s for s in believed[DEVICE, k]))
    times = declared_times(network.instance(declared), 0)
    assert times[DEVICE, 4] == pytest.approx([3.0 * s for s in believed[DEVICE, 4]])
    assert times[LINK, 0] == pytest.approx(believed[LINK, 0])


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


def test_a_time_of_the_whole_counts_in_paced_runs_alone():
    report = {"paced_s": 1e6, "train_s": 1.0, "prepare_s": 0.5, "collect_s": 0.5, "exchange_s": 5.0}
    assert MeasuredNetwork(1).upload_seconds(report) == 3.0
    assert MeasuredNetwork(1, time_scale=2.0).upload_seconds(report) == (1e6 - 1.0) / 2.0
    assert MeasuredNetwork(1, time_scale=2.0).upload_seconds(report | {"paced_s": None}) is None


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


def test_a_cluster_that_has_no_plan_without_its_lost_device_is_planned_with_it():
    """Left out it would not train, and nobody would hear that the device is back."""
    uniform = make_policy("uniform", plan_file="", seed=0, c11=False)
    planner = RoundPlanner(bench.scenario(), uniform, adaptation=Adaptation(MeasuredNetwork(1)))
    first = planner.plan(1, [1.0]).plans[0]
    times = planner.adaptation.network.clusters[0]
    times.believe((DEVICE, 0), 0.1, 0.1)
    needed = next(k for k, blocks in enumerate(first.delta) if blocks)
    times.away = {needed}
    declared = planner.plan(1, [1.0], absent={0: "its node is not connected"}).declared
    assert times.away == {needed} and planner.adaptation.network.instance(declared).clusters[0].devices[needed].mem == 0
    decision = planner.plan(2, [1.0])
    assert decision.selected == [True] and decision.plans[0].delta == first.delta and not times.away


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


def test_a_prediction_stands_beside_what_was_measured():
    planner, cluster = planner_of(), SyntheticCluster(0.0, 0)
    play(planner, cluster, bench.steady, range(1, 20))
    decision = planner.plan(20, [1.0])
    report = cluster.train(decision.declared, decision.plans[0], bench.Truth())
    compared = planner.adaptation.comparison(0, report, 3.0)
    assert compared["predicted_train_s"] == pytest.approx(compared["measured_train_s"], rel=0.01)
    assert compared["predicted_pipeline_s"] == pytest.approx(compared["measured_pipeline_s"], rel=0.01)
    assert compared["predicted_upload_s"] == 3.0 and compared["measured_upload_s"] is None


@pytest.mark.slow
def test_the_benchmarks_claims_hold():
    rows = {row["story"]: row for row in synthetic(1, 0.02, lambda text: None, judged_every=8)}
    assert rows["steady noise"]["false_replans"] == 0
    for row in rows.values():
        assert row["prediction_error"] < 0.03
        assert row["regret_mean"] < 0.05
        assert row["rounds_until_found"] is None or row["rounds_until_found"] <= 2


def test_a_link_that_nobody_waits_for_is_believed_to_be_faster():
    planner, cluster = planner_of(), SyntheticCluster(0.01, 0)
    plans, _ = play(planner, cluster, bench.steady, range(1, 8))
    first, times = plans[-1].devices[0], planner.adaptation.network.clusters[0]
    times.believe((LINK, first), 5.0, 5.0)
    for number in range(8, 30):
        decision = planner.plan(number, [1.0])
        report = cluster.train(decision.declared, plans[-1], bench.Truth())
        del report["measured"]["links"][str(first)]
        planner.adaptation.observe(number, 0, report, decision.declared, None)
    assert times[LINK, first].seconds(2) < 0.1 * 15.0


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


def test_an_idle_device_works_for_one_round_when_nobody_knows_it_any_more(monkeypatch):
    monkeypatch.setattr("strategies.planning.adaptation.UNSEEN", 8)
    planner, cluster = planner_of(), SyntheticCluster(0.0, 0, spare=False)

    def useless(number):
        truth = bench.Truth()
        truth.teb[4] *= 2.0 if number <= 20 else 0.2
        return truth

    plans, changes = play(planner, cluster, useless, range(1, 30))
    idle = [number for number, plan in enumerate(plans, 1) if not plan.delta[4]]
    trials = [number for number, change in changes if change.trial]
    # Before its end nobody sees that it is fast now; the trial's round alone has one TEB on it.
    assert trials and trials[0] < 21 and trials[0] + 1 in idle and plans[trials[0] - 1].delta[4] == 1
    assert "has not worked for" in next(change.reason for _, change in changes if change.trial)
    assert plans[-1].delta[4] > 1


def test_an_idle_device_that_becomes_faster_is_seen_by_what_it_tries():
    planner, cluster = planner_of(), SyntheticCluster(0.01, 0)

    def useless(number):
        truth = bench.Truth()
        truth.teb[4] *= 2.0 if number <= 20 else 0.2
        return truth

    plans, changes = play(planner, cluster, useless, range(1, 26))
    assert not plans[19].delta[4] and not any(change.trial for _, change in changes)
    number, change = next((n, c) for n, c in changes if n > 20)
    assert number <= 23 and change.taken and plans[number - 1].delta[4] > 1
    assert "a TEB on device 4 takes 0.1" in change.reason


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


def test_what_was_tried_before_a_device_worked_does_not_count_after_it():
    network = MeasuredNetwork(1)
    times = network.clusters[0]
    times.believe((DEVICE, 0), 0.1, 0.01)
    times.times[DEVICE, 0].last_round = 3
    tried = [(8.0, 0.5, 3.0)]
    assert times._take_spare(4, 0, tried) == []
    assert times[DEVICE, 0].seconds(8) == pytest.approx(0.18)
    for number in range(5, 12):
        times._take_spare(number, 0, [(8.0, 0.25, 3.0)])
    assert times[DEVICE, 0].seconds(8) == pytest.approx(0.09, rel=0.1)
    times.times[DEVICE, 0].last_round = 12
    times._take_spare(13, 0, [(8.0, 5.0, 3.0)])
    assert times[DEVICE, 0].seconds(8) == pytest.approx(0.09, rel=0.1)


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


def test_a_round_in_which_a_device_was_lost_says_nothing_of_the_event_simulator():
    planner, cluster = planner_of(), SyntheticCluster(0.0, 0)
    play(planner, cluster, bench.steady, range(1, 8))
    times = planner.adaptation.network.clusters[0]
    error = times.model_error
    decision = planner.plan(8, [1.0])
    report = cluster.train(decision.declared, decision.plans[0], bench.Truth())
    report["measured"]["pipeline_s"] *= 1.05
    planner.adaptation.observe(8, 0, report | {"faults": [{"kind": "device", "device": 1}]}, decision.declared, None)
    assert times.model_error == error
    planner.plan(9, [1.0])
    planner.adaptation.observe(9, 0, report | {"faults": [{"kind": "joined", "device": 1}]}, decision.declared, None)
    assert times.model_error == error
    planner.plan(10, [1.0])
    planner.adaptation.observe(10, 0, report, decision.declared, None)
    assert times.model_error > error


def test_the_way_to_the_control_unit_is_like_the_other_links_until_two_rounds_say_otherwise():
    times = MeasuredNetwork(1).clusters[0]
    for k, seconds in enumerate((0.1, 0.2, 0.9)):
        times.believe((LINK, k), 0.5 * seconds, 0.5 * seconds)
    # A single delay is no rate.
    times._take(6, OUTLET, 0, [(1.0, 40.0, 8.0)], {})
    assert times[OUTLET, 0].seconds(1.0) == pytest.approx(0.2)
    for number in (7, 8):
        times._take(number, OUTLET, 0, [(1.0, 40.0, 8.0)], {})
    assert times[OUTLET, 0].seconds(1.0) == pytest.approx(40.0, rel=0.1)
    alone = MeasuredNetwork(1).clusters[0]
    alone._take(6, OUTLET, 0, [(1.0, 40.0, 8.0)], {})
    assert alone[OUTLET, 0].seconds(1.0) == pytest.approx(40.0)
