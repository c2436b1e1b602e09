"""A divided band: exact for delay alone, between its bound and a search over divisions otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.scenario import load_scenario
from helpers import oracles
from helpers.instances import instance_to_dict, matches_of, random_instance
from strategies.dssda.evaluation import score, violations
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.least_band import delay_alone
from strategies.dssda.planner import plan_round
from strategies.dssda.split_band import divided
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy


def drawn(generator, *, delay, num_clusters=2):
    raw = random_instance(generator, num_clusters=num_clusters, num_channels=2, num_devices=1, V=0.5)
    raw |= {"L": 2, "m_set": [1, 2], "S_min": 1, "S_max": None, "energy": "none", "gamma0": 1.0}
    raw["band_hz"] = float(generator.uniform(0.6e6, 1.6e6))
    for cluster in raw["clusters"]:
        cluster["up"] |= {"eps_max": None, "Emax": float(generator.uniform(2.0, 8.0))}
        if delay:
            cluster |= dict.fromkeys(("wS", "wS2", "wP", "wE", "wG", "skip"), 0.0)
    return raw


def best_division(raw):
    """Least objective over divisions among two clusters, each by brute force: a grid, then golden section."""

    def cost(share):
        bands = share * raw["band_hz"], (1 - share) * raw["band_hz"]
        clusters = [c | {"B": [b] * 2} for c, b in zip(raw["clusters"], bands, strict=True)]
        value = oracles.cheapest_round(raw | {"clusters": clusters})
        return np.inf if value is None else value

    shares = np.linspace(0.04, 0.96, 17)
    values = [cost(share) for share in shares]
    at = int(np.argmin(values))
    ends = shares[max(at - 1, 0)], shares[min(at + 1, len(shares) - 1)]
    return min(values[at], oracles.golden_section(cost, *ends, steps=18)[1])


def check_division(instance, answer):
    """The bands are the whole band, and times, costs and constraints are those of the bands."""
    bands = [c.band_hz for c in answer.clusters if c.selected]
    assert sum(bands) == pytest.approx(instance.band_hz) and min(bands) > 0
    assert all(c.band_hz is None for c in answer.clusters if not c.selected)
    bands_in_file = [c.to_dict().get("band_hz") for c in answer.clusters]
    assert bands_in_file == [c.band_hz for c in answer.clusters]
    with_bands = divided(instance, answer)
    assert with_bands.band_hz is None and violations(with_bands, matches_of(answer)) == []
    assert answer.objective == pytest.approx(score(with_bands, matches_of(answer), "feasible").objective)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [True, False])
def test_two_clusters_divide_a_band_as_a_search_over_divisions_does(delay):
    generator, planned = np.random.default_rng(51 + delay), 0
    for _ in range(8 if delay else 4):
        raw = drawn(generator, delay=delay)
        instance = parse_instance(raw, "case")
        answer = plan_round(instance)
        if answer.status == "infeasible":
            continue
        best = best_division(raw)
        check_division(instance, answer)
        assert answer.lower_bound <= best * (1 + 1e-6)
        assert answer.objective == pytest.approx(best, rel=1e-4 if delay else 2e-3)
        if delay:
            assert delay_alone(instance) and answer.status == "optimal" and answer.gap <= 1e-6
        else:
            assert not delay_alone(instance) and 0.0 <= answer.gap <= 0.02
        planned += 1
    assert planned >= (5 if delay else 2)


def test_for_delay_alone_all_end_together_and_no_band_is_left():
    generator, seen = np.random.default_rng(53), 0
    for _ in range(20):
        raw = drawn(generator, delay=True, num_clusters=3)
        instance = parse_instance(raw, "case")
        answer = plan_round(instance)
        if answer.status == "infeasible":
            continue
        check_division(instance, answer)
        even = plan_round(divided_evenly(instance))
        assert answer.gap <= 1e-9 and answer.objective <= even.objective * (1 + 1e-12)
        ends = [instance.steps * c.choice.pipeline_s + c.uplink_s for c in answer.clusters if c.selected]
        assert max(ends) == pytest.approx(answer.latency_s)
        assert min(ends) == pytest.approx(answer.latency_s, rel=1e-6)
        seen += 1
    assert seen > 10


def test_a_band_that_one_cluster_has_alone_is_its_own():
    """The least deadline needs all of it: rounding must not leave too little."""
    for seed in range(20):
        scenario = load_scenario("table2", seed).first(1)
        split = replace(scenario, planner=replace(scenario.planner, bandwidth="split"))
        answer = RoundPlanner(split, make_policy("dssda"), power_control="exact").plan(1, [1.0]).answer
        assert answer.status == "optimal"
        assert answer.clusters[0].band_hz == pytest.approx(scenario.uplinks[0].bandwidth_hz)


def divided_evenly(instance):
    band = instance.band_hz / instance.num_matched
    clusters = tuple(replace(c, B=(band,) * len(c.B)) for c in instance.clusters)
    return replace(instance, band_hz=None, clusters=clusters)


def test_a_file_keeps_the_band():
    raw = drawn(np.random.default_rng(54), delay=True)
    instance = parse_instance(raw, "case")
    assert parse_instance(instance_to_dict(instance), "case") == instance and instance.band_hz == raw["band_hz"]
    with pytest.raises(ValueError, match="case: band_hz: expected a number above 0, found 0"):
        parse_instance(raw | {"band_hz": 0}, "case")


def test_a_run_divides_the_band_that_its_clusters_have_on_average():
    scenario = load_scenario("table2")
    split = replace(scenario, planner=replace(scenario.planner, bandwidth="split"))
    whole = sum(u.bandwidth_hz for u in scenario.uplinks)
    ours, fixed = RoundPlanner(split, make_policy("dssda")), RoundPlanner(scenario, make_policy("dssda"))
    decision, before = ours.plan(1, [1.0] * 3), fixed.plan(1, [1.0] * 3)
    assert sum(c.band_hz for c in decision.answer.clusters) == pytest.approx(whole)
    assert decision.answer.latency_s < before.answer.latency_s and decision.answer.gap <= 1e-6
    assert decision.power_control.used == "sca"
    # Every other policy has an even part.
    even = RoundPlanner(split, make_policy("delay-only")).plan(1, [1.0] * 3)
    np.testing.assert_allclose([c.B for c in even.instance.clusters], whole / 3)
    assert all(c.band_hz is None for c in even.answer.clusters)
