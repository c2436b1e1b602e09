"""Algorithms 2 to 4 with the printed drift, C11 and the printed loops."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from helpers import oracles
from helpers.instances import instance_to_dict, matches_of
from strategies.dssda.convergence import gamma
from strategies.dssda.evaluation import violations
from strategies.dssda.paper.paper_printed import first_choice, plan_round_printed
from strategies.dssda.planner import plan_round
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import per_round_bound, round_instance
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def printed_round(name="table2", virtual=0.0, number=1, gamma_max=None):
    scenario = load_scenario(name)
    if gamma_max is not None:
        scenario = replace(scenario, planner=replace(scenario.planner, gamma_max=gamma_max))
    queues = Queues(np.full(scenario.num_clusters, virtual), np.zeros(scenario.num_clusters))
    instance = round_instance(scenario, NetworkTrace(scenario).round(number), queues, drift="printed")
    return instance, per_round_bound(scenario)


def test_the_weights_are_those_of_eq_32():
    instance, _ = printed_round(virtual=1.5)
    for cluster in instance.clusters:
        weights = (cluster.wS, cluster.wS2, cluster.wP, cluster.wE, cluster.wG, cluster.skip)
        assert weights == (1.5, 0.0, 1.5, 0.0, 0.0, 0.0)


def test_algorithm_2_starts_at_one_segment_where_a_device_holds_all_tebs():
    instance, _ = printed_round()
    fewest = min(oracles.best_pipelines(instance_to_dict(replace(instance, m_set=(8, 16))), 0))
    assert fewest == first_choice(instance, 0).num_segments == 3  # 1.5 GB hold four of twelve TEBs
    roomy = replace(instance, gamma0=1.0, energy="none")
    start = first_choice(roomy, 0)
    speed = roomy.device_arrays(0).phi * roomy.device_arrays(0).f
    assert (start.num_segments, start.m) == (1, 1) and start.delta[int(np.argmax(speed))] == 12


@pytest.mark.parametrize("virtual", [0.0, 0.7, 5.0, 60.0])
def test_the_queues_come_to_rest_within_the_round_because_c11_holds(virtual):
    instance, bound = printed_round("table2", virtual, gamma_max=5.0)
    planned = plan_round_printed(instance, bound)
    assert planned.status == "stable" and planned.answer.status == "feasible"
    assert violations(instance, matches_of(planned.answer)) == []
    for n, part in enumerate(planned.answer.clusters):
        if part.selected:
            distortion = float(instance.distortion(n, part.power_w, part.channel))
            now = float(gamma(part.choice.num_segments, instance.L, distortion, bound.parameters))
            assert now <= bound.gamma_max * (1 + 1e-9)
            # A queue is stable at 0, or where Gamma is its limit.
            assert planned.queues[n] == 0.0 or now == pytest.approx(bound.gamma_max)


def test_segments_and_micro_batches_are_each_the_best_for_the_other():
    """The iterations end where (39) and (38) change nothing."""
    instance, bound = printed_round("table2", gamma_max=5.0)
    planned = plan_round_printed(instance, bound)
    raw = instance_to_dict(instance)
    for n, part in enumerate(planned.answer.clusters):
        choice = part.choice
        table = oracles.best_pipelines(raw | {"m_set": [choice.m]}, n)
        allowed = {s: t for s, t in table.items() if float(gamma(s, instance.L, 1.0, bound.parameters)) <= 5.0}
        assert choice.pipeline_s == pytest.approx(min(allowed.values()), rel=1e-9)
        for m in (choice.m - 1, choice.m + 1):
            other = oracles.pipeline_time(raw, n, choice.delta, m, None)
            assert other is None or other >= choice.pipeline_s * (1 - 1e-9)


def test_a_bound_that_no_power_keeps_is_told():
    instance, bound = printed_round(gamma_max=1.0)
    planned = plan_round_printed(instance, bound)
    assert planned.status == planned.answer.status == "infeasible"
    assert any(fault.constraint == "C11" for fault in planned.answer.infeasible)


def test_the_policy_is_as_printed_with_both_options_alone_and_never_beats_the_certified_planner():
    scenario = load_scenario("table2")
    scenario = replace(scenario, planner=replace(scenario.planner, gamma_max=5.0))
    assert make_policy("dssda-paper", c11=True, drift="printed").printed
    assert not make_policy("dssda-paper", c11=True).printed
    rounds = list(plan_rounds(scenario, make_policy("dssda-paper", c11=True, drift="printed"), 2, drift="printed"))
    for planned in rounds:
        assert planned.violations == [] and np.all(planned.gamma <= 5.0 * (1 + 1e-9))
        assert planned.queues.virtual.tolist() == [0.0, 0.0, 0.0]
        assert planned.answer.objective >= plan_round(planned.instance).lower_bound * (1 - 1e-9)
