"""One contract for every policy that decides a round, and what sets each apart."""

import json
from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import write_plans
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from helpers.instances import matches_of
from strategies.dssda.evaluation import Match, violations
from strategies.dssda.planner import plan_round
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.policies import POLICIES, make_policy
from strategies.planning.policy import Round
from strategies.planning.segment_rules import cluster_plans

SCENARIOS = ("table2", "table2-contended", "physical")


def first_round(name, queue=0.7):
    scenario = load_scenario(name)
    queues = Queues(np.linspace(0, queue, scenario.num_clusters), np.zeros(scenario.num_clusters))
    instance = round_instance(scenario, NetworkTrace(scenario).round(1), queues)
    return Round(number=1, instance=instance, losses=np.linspace(1.0, 2.0, scenario.num_clusters))


def policies(round_, tmp_path):
    """Every policy; the fixed one replays what dssda decided."""
    path = tmp_path / "plan.json"
    write_plans(path, cluster_plans(round_.instance, plan_round(round_.instance)))
    for name in POLICIES:
        yield make_policy(name, plan_file=str(path) if name == "fixed" else "")
    for name in ("random", "loss-only", "delay-only"):
        yield make_policy(name + "+optimal")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_policy_meets_all_constraints_and_none_beats_the_certified_bound(scenario, tmp_path):
    round_ = first_round(scenario)
    best = plan_round(round_.instance)
    assert best.status == "optimal" and best.gap <= 1e-6
    for policy in policies(round_, tmp_path):
        answer = policy.plan(round_)
        matches = matches_of(answer)
        assert violations(round_.instance, matches) == [], policy.name
        assert sum(c.selected for c in answer.clusters) == round_.instance.num_matched
        assert answer.objective >= best.lower_bound * (1 - 1e-12), policy.name
        assert json.loads(json.dumps(answer.to_dict()))["status"] in ("optimal", "feasible")


def test_every_policy_fills_memory_that_holds_a_whole_number_of_tebs_exactly(tmp_path):
    round_ = first_round("table2")
    # In binary three times 0.067 is a little more than 0.201.
    devices = [tuple(replace(device, mem=0.201e9) for device in c.devices) for c in round_.instance.clusters]
    clusters = tuple(replace(c, devices=d) for c, d in zip(round_.instance.clusters, devices, strict=True))
    full = replace(round_, instance=replace(round_.instance, L=18, gamma0=0.067 * 1e9, clusters=clusters))
    for policy in policies(full, tmp_path):
        answer = policy.plan(full)
        assert [c.choice.delta for c in answer.clusters] == [(3,) * 6] * 3, policy.name


def test_a_fixed_plan_without_channels_gets_them_as_dssda_would(tmp_path):
    round_ = first_round("table2")
    plans = [plan.to_dict() | {"channel": None} for plan in cluster_plans(round_.instance, plan_round(round_.instance))]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "collapipe-plan/1", "clusters": plans}))
    answer = make_policy("fixed", plan_file=str(path)).plan(round_)
    assert answer.objective == pytest.approx(plan_round(round_.instance).objective, rel=1e-6)


def test_what_a_fixed_plan_names_stays_where_others_are_open(tmp_path):
    """One open channel was enough, and all clusters were matched anew."""
    round_ = first_round("table2")
    plans = [plan.to_dict() for plan in cluster_plans(round_.instance, plan_round(round_.instance))]
    path = tmp_path / "plan.json"

    def answered(*links):
        clusters = [
            plan | {"channel": channel, "power_w": power} for plan, (channel, power) in zip(plans, links, strict=True)
        ]
        path.write_text(json.dumps({"format": "collapipe-plan/1", "clusters": clusters}))
        answer = make_policy("fixed", plan_file=str(path)).plan(round_)
        matches = [Match(c.choice, c.channel, c.power_w) for c in answer.clusters]
        assert violations(round_.instance, matches) == [] and answer.status == "feasible"
        return [(c.channel, c.power_w) for c in answer.clusters], answer.objective

    for channel in range(4):
        [first, *others], _ = answered((channel, 0.1), (None, None), (None, None))
        assert first == (channel, 0.1) and channel not in dict(others)
    best = plan_round(round_.instance)
    named = best.clusters[0].channel, best.clusters[0].power_w
    links, objective = answered(named, (None, None), (None, None))
    assert links[0] == named and objective == pytest.approx(best.objective, rel=0.02)
    # A channel without a power, and a power without a channel.
    [(kept, power), (other, limit), last], _ = answered((2, None), (None, 0.2), (1, 0.1))
    assert (kept, limit, last) == (2, 0.2, (1, 0.1)) and power > 0 and other in (0, 3)


def test_a_fixed_plan_keeps_to_channels_and_powers_that_there_are(tmp_path):
    """Clusters on one channel were planned as feasible, and so were 9 W, or 0 W, with which no upload ends."""
    round_ = first_round("table2")
    plans = [plan.to_dict() for plan in cluster_plans(round_.instance, plan_round(round_.instance))]
    path = tmp_path / "plan.json"

    def refused(**keys):
        path.write_text(json.dumps({"format": "collapipe-plan/1", "clusters": [plans[0], plans[1] | keys, plans[2]]}))
        with pytest.raises(ValueError) as error:
            make_policy("fixed", plan_file=str(path)).plan(round_)
        return str(error.value)

    message = refused(channel=plans[0]["channel"])
    assert message.startswith(f"{path}: clusters[1]: channel {plans[0]['channel']}: clusters[0] has it, too, expected")
    limit = round_.instance.clusters[1].up.Pmax
    for power, text in ((9.0, "9"), (0.0, "0")):
        expected = f"clusters[1]: power_w {text}: expected null or a power above 0 and at most the uplink's {limit:g} W"
        assert expected in refused(power_w=power)


def test_a_fixed_plan_that_does_not_fit_is_refused(tmp_path):
    round_ = first_round("table2")
    plans = [plan.to_dict() for plan in cluster_plans(round_.instance, plan_round(round_.instance))]
    path = tmp_path / "plan.json"

    def refused(clusters):
        path.write_text(json.dumps({"format": "collapipe-plan/1", "clusters": clusters}))
        with pytest.raises(ValueError) as error:
            make_policy("fixed", plan_file=str(path)).plan(round_)
        return str(error.value)

    assert "has plans for 2 clusters, the problem has 3" in refused(plans[:2])
    assert "clusters[1]: channel 9: expected null or a channel from 0 to 3" in refused(
        [plans[0], plans[1] | {"channel": 9}, plans[2]]
    )
    assert "sums to 3, expected the model's L = 12" in refused([plans[0] | {"delta": [3, 0, 0, 0, 0, 0]}, *plans[1:]])


def test_random_takes_others_each_round_and_the_same_for_a_seed():
    round_ = first_round("table2-contended")

    def taken(seed, number):
        policy = make_policy("random", seed=seed)
        answer = policy.plan(Round(number=number, instance=round_.instance, losses=round_.losses))
        return tuple(c.selected for c in answer.clusters)

    assert taken(0, 1) == taken(0, 1)
    assert len({taken(0, number) for number in range(1, 9)}) > 4
    assert len({taken(seed, 1) for seed in range(8)}) > 4


def test_delay_only_is_not_slower_than_any_seed_of_random():
    round_ = first_round("table2-contended")
    fastest = make_policy("delay-only").plan(round_).latency_s
    assert all(make_policy("random", seed=s).plan(round_).latency_s >= fastest for s in range(10))


def test_names_are_checked():
    with pytest.raises(ValueError, match="policy: expected one of dssda, dssda-paper, .*found 'best'"):
        make_policy("best")
    with pytest.raises(ValueError, match="policy: fixed needs a plan file"):
        make_policy("fixed")
    with pytest.raises(ValueError, match="found 'random\\+even'"):
        make_policy("random+even")
    with pytest.raises(ValueError, match="C11 needs a scenario"):
        make_policy("dssda-paper", c11=True).plan(first_round("table2"))


@pytest.mark.parametrize("name", ["random", "loss-only", "delay-only"])
def test_a_cluster_whose_only_channel_is_taken_is_passed_over_for_the_next_in_rank(name):
    """The first two by rank may share their only channel: others can be selected all the same."""
    scenario = load_scenario("table2-contended")
    instance = round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters))
    selections = []
    for seed in range(6):
        clusters = list(instance.clusters)
        for n in np.random.default_rng(seed).permutation(len(clusters))[:5]:
            # Nobody can send against so much interference, but on channel 0.
            clusters[n] = replace(clusters[n], I=(clusters[n].I[0], *[1e3] * (len(clusters[n].I) - 1)))
        blocked = replace(instance, clusters=tuple(clusters))
        answer = make_policy(name, seed=seed).plan(Round(number=1, instance=blocked, losses=np.linspace(1.0, 2.0, 8)))
        assert answer.status == "feasible"
        matches = matches_of(answer)
        assert violations(blocked, matches) == [] and sum(c.selected for c in answer.clusters) == instance.num_matched
        selections.append([c.selected for c in answer.clusters])
    assert len({tuple(selected) for selected in selections}) > 1
