"""Rounds of clusters with different devices: every policy plans for each cluster's own, and none beats all plans."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import write_plans
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import parse_scenario
from helpers import oracles
from helpers.instances import instance_to_dict
from strategies.dssda.planner import plan_round
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.costs import pipeline_work
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import POLICIES, make_policy
from strategies.registry import STRATEGIES, strategy_class

RAW = {
    "format": "collapipe-scenario/1",
    "channels": 2,
    "device": {
        "flop-per-cycle": 16.0,
        "frequency-ghz": {"min": 0.2, "max": 0.8},
        "memory-gb": {"min": 0.8, "max": 1.6},
    },
    "block": {"memory-gb": 0.375, "backward-per": "sample"},
    "planner": {"blocks": 4, "batch-size": 6, "gamma-max": 5.0},
    "cluster": [
        {"devices": 2, "device": {"memory-gb": 1.6}},
        {"devices": 3, "uplink": {"max-power-w": 0.3}, "link": {"bandwidth-mhz": 2.0}},
        {"devices": 4, "device": {"flop-per-cycle": [10.0, 24.0, 12.0, 20.0], "energy-budget-j": 2.0}},
    ],
}
SIZES = [2, 3, 4]


def instances():
    """Rounds with queues, under both forms of the latency."""
    for seed in range(3):
        for latency, queue in (("eq15", 0.0), ("flowshop", 0.7)):
            scenario = parse_scenario(RAW | {"seed": seed, "planner": RAW["planner"] | {"latency": latency}}, "x")
            queues = Queues(np.linspace(0, queue, 3), np.zeros(3))
            yield round_instance(scenario, NetworkTrace(scenario).round(1 + seed), queues)


def test_the_certified_round_of_unequal_clusters_is_the_best_of_an_enumeration():
    picked = set()
    for instance in instances():
        answer = plan_round(instance)
        assert answer.status == "optimal"
        assert answer.objective == pytest.approx(oracles.cheapest_round(instance_to_dict(instance)), rel=1e-6)
        for n, part in enumerate(answer.clusters):
            assert part.choice is None or len(part.choice.delta) == SIZES[n]
            picked |= {n} if part.selected else set()
    assert picked == {0, 1, 2}


def test_segments_of_each_cluster_are_the_best_of_an_enumeration():
    for instance in instances():
        answer = plan_round(replace(instance, V=1e3))
        for n, part in enumerate(answer.clusters):
            if part.selected:
                best = oracles.best_pipelines(instance_to_dict(instance), n)
                assert part.choice.pipeline_s == pytest.approx(best[part.choice.num_segments], rel=1e-9)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fixed"] + ["random+optimal"])
def test_every_policy_plans_for_each_clusters_own_devices(name):
    check_rounds(make_policy(name))


def test_a_plan_file_keeps_each_clusters_own_devices(tmp_path):
    scenario = parse_scenario(RAW, "x")
    [planned] = plan_rounds(scenario, make_policy("dssda"), 1)
    write_plans(tmp_path / "plan.json", planned.plans)
    policy = make_policy("fixed", plan_file=str(tmp_path / "plan.json"))
    [again] = plan_rounds(scenario, policy, 1)
    assert [p.delta for p in again.plans] == [p.delta for p in planned.plans]
    more = [table | {"devices": size + 1, "device": {}} for table, size in zip(RAW["cluster"], SIZES, strict=True)]
    with pytest.raises(ValueError, match=r"delta has \d entries, expected one for each of the K = \d"):
        list(plan_rounds(parse_scenario(RAW | {"cluster": more}, "x"), policy, 1))


@pytest.mark.parametrize("name", ["vanilla-fl", "pipeline", "titanic"])
def test_every_baseline_plans_for_each_clusters_own_devices(name):
    assert name in STRATEGIES
    cls = strategy_class(name)
    check_rounds(cls.own_policy(0), waived=cls.traits.waives, work=getattr(cls, "work", pipeline_work))


def check_rounds(policy, waived=(), work=pipeline_work):
    scenario = parse_scenario(RAW, "x")
    trained = set()
    for planned in plan_rounds(scenario, policy, 4, work=work):
        for n, (plan, devices) in enumerate(zip(planned.plans, scenario.clusters, strict=True)):
            if not planned.selected[n]:
                continue
            trained.add(n)
            memory = None if "C7" in waived else [d.memory for d in devices]
            plan.check(num_blocks=4, batch_size=6, num_devices=SIZES[n], memory=memory, block_memory=0.375e9)
            costs = planned.costs.clusters[n].work
            assert len(costs.device_energy_j) == len(costs.device_memory_bytes) == SIZES[n]
            assert costs.pipeline_s > 0
    assert len(trained) >= 2
