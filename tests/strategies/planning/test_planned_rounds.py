"""Rounds of planning with queues that evolve."""

import dataclasses

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.latency import flow_shop_latency
from client_pipeline.system.scenario import load_scenario
from strategies.dssda.evaluation import teb_and_link_seconds
from strategies.planning.costs import pipeline_work
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def with_planner(scenario, **changes):
    return dataclasses.replace(scenario, planner=dataclasses.replace(scenario.planner, **changes))


@pytest.mark.slow
def test_the_queues_keep_the_mean_bound_below_its_threshold():
    rounds = list(plan_rounds(load_scenario("table2-contended"), make_policy("dssda"), 60))
    late = rounds[15:]
    assert np.mean([r.gamma for r in late]) <= 3.4
    assert max(r.queues.virtual.max() for r in late) < 40
    assert all(r.answer.status == "optimal" and r.answer.gap <= 1e-6 and not r.violations for r in rounds)


@pytest.mark.slow
def test_without_queues_the_planner_would_break_the_threshold():
    scenario = with_planner(load_scenario("table2-contended"), gamma_max=1e9)
    rounds = list(plan_rounds(scenario, make_policy("dssda"), 40))
    assert np.mean([r.gamma for r in rounds]) > 3.4
    assert all(not r.queues.virtual.any() for r in rounds)


@pytest.mark.slow
def test_the_printed_drift_diverges_where_the_true_one_settles():
    """P2 as printed adds Y_n p_n: it lowers the power just when the queue is long. V = 0.01, 120 rounds of table2."""
    scenario = with_planner(load_scenario("table2"), v=0.01)
    last = {}
    for drift in ("true", "printed"):
        rounds = list(plan_rounds(scenario, make_policy("dssda"), 120, drift=drift))
        half, end = rounds[60], rounds[-1]
        last[drift] = (half.queues.virtual.max(), end.queues.virtual.max(), np.mean([r.latency_s for r in rounds[30:]]))
    assert last["true"][1] < 3
    assert last["printed"][1] > 100 and last["printed"][1] > 1.5 * last["printed"][0]
    assert last["printed"][2] > 1.5 * last["true"][2]


@pytest.mark.slow
def test_the_energy_queue_keeps_the_mean_upload_energy_below_its_budget():
    scenario = load_scenario("physical")
    budget = scenario.uplinks[0].mean_energy_j

    def spent(network):
        rounds = list(plan_rounds(network, make_policy("dssda"), 60))[15:]
        return np.mean([[c.uplink_energy_j or 0.0 for c in r.answer.clusters] for r in rounds], axis=0)

    free = dataclasses.replace(
        scenario, uplinks=tuple(dataclasses.replace(u, mean_energy_j=None) for u in scenario.uplinks)
    )
    assert np.all(spent(scenario) <= budget * 1.1)
    assert np.max(spent(free)) > 1.5 * budget


def test_a_cluster_without_a_plan_is_left_out_with_the_reason():
    scenario = load_scenario("table2")
    weak = tuple(dataclasses.replace(d, memory=0.1e9) for d in scenario.clusters[1])
    scenario = dataclasses.replace(scenario, clusters=(scenario.clusters[0], weak, scenario.clusters[2]))
    for name in ("dssda", "uniform", "random", "delay-only", "dssda-paper"):
        for done in plan_rounds(scenario, make_policy(name), 2):
            assert done.selected == [True, False, True], name
            assert done.answer.status in ("optimal", "feasible")
            if name in ("dssda", "dssda-paper"):
                [reason] = [i for i in done.answer.infeasible if i.cluster == 1]
                assert (reason.constraint, reason.needs) == ("C7", 12)


def test_when_nobody_has_a_plan_the_round_says_so():
    scenario = load_scenario("table2")
    weak = tuple(tuple(dataclasses.replace(d, memory=0.1e9) for d in c) for c in scenario.clusters)
    [done] = plan_rounds(dataclasses.replace(scenario, clusters=weak), make_policy("dssda"), 1)
    assert done.answer.status == "infeasible"
    assert {i.cluster for i in done.answer.infeasible} == {0, 1, 2}
    assert np.isnan(done.latency_s)
    assert not any(done.selected)


def test_event_simulated_time_of_even_micro_batches_is_the_flow_shop():
    [done] = plan_rounds(load_scenario("table2"), make_policy("dssda"), 1)
    for m in (8, 16, 64):  # all divide the batch
        order = (3, 1, 0, 5, 4, 2)
        plan = ClusterPlan(delta=(4, 3, 2, 1, 1, 1), order=order, m=m)
        teb, link = teb_and_link_seconds(done.instance, 0, m)
        stages = [plan.delta[k] * teb[k] + (0 if k == order[-1] else link[k]) for k in order]
        work = pipeline_work(done.instance, 0, plan)
        assert work.pipeline_fused_s == pytest.approx(flow_shop_latency(stages, m), rel=1e-9)


@pytest.mark.slow
def test_planned_s_and_m_are_those_of_the_paper():
    """Fig. 5 has S = 3, 4, 5 with m = 9, 11, 14."""
    choices = []
    for seed in range(6):
        for done in plan_rounds(load_scenario("table2", seed), make_policy("dssda"), 20):
            choices += [c.choice for c in done.answer.clusters if c.choice]
    mean_m = {s: np.mean([c.m for c in choices if c.num_segments == s]) for s in (3, 4, 5)}
    assert mean_m == pytest.approx({3: 9, 4: 11, 5: 14}, abs=1.5)
    assert np.mean([c.num_segments in (3, 4, 5) for c in choices]) > 0.85
