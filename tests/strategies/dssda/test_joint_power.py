"""The powers of a whole round by convex programs, against a search over deadlines and powers."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import random_instance
from strategies.dssda.evaluation import Match, score, violations
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.joint_power import solve_joint_powers
from strategies.dssda.planner import plan_round


def planned(generator, **changes):
    """A feasible random round as JSON values, parsed, and its matches with exact powers."""
    while True:
        raw = random_instance(generator, **changes)
        for cluster in raw["clusters"]:
            cluster["wE"] = float(generator.choice([0.0, 10 ** generator.uniform(-1, 1.5)]))
            cluster["up"]["Emax"] = float(generator.uniform(2.0, 20.0))
        raw["act"]["z_enc_bits"] = float(generator.choice([0.0, 1e6]))
        instance = parse_instance(raw, "drawn")
        answer = plan_round(instance)
        if answer.status == "optimal":
            matches = [Match(c.choice, c.channel, c.power_w) if c.selected else None for c in answer.clusters]
            return raw, instance, matches, answer


def test_the_programs_end_at_the_optimum_of_a_search_over_deadlines_and_powers():
    generator = np.random.default_rng(21)
    several, energy = 0, 0
    for _ in range(60):
        raw, instance, matches, answer = planned(generator)
        found = solve_joint_powers(instance, matches)
        assert found.status == "converged", found
        powers = iter(found.power_w)
        ours = [m and replace(m, power_w=next(powers)) for m in matches]
        assert violations(instance, ours) == []
        objective = score(instance, ours, "feasible").objective
        chosen = [m and (m.channel, m.choice.num_segments, m.choice.m, m.choice.pipeline_s) for m in matches]
        assert objective == pytest.approx(oracles.cheapest_powers(raw, chosen), rel=2e-6)
        assert objective == pytest.approx(answer.objective, rel=1e-6)
        several += found.iterations > 1
        energy += any(m and c.wE > 0 for m, c in zip(matches, instance.clusters, strict=True))
    assert several > 10 and energy > 20


def test_among_powers_of_equal_cost_the_least_are_taken():
    generator = np.random.default_rng(22)
    for _ in range(10):
        _, instance, matches, _ = planned(generator, num_clusters=3, num_channels=3)
        free = tuple(replace(c, wP=0.0, wE=0.0, wG=0.0, up=replace(c.up, eps_max=None)) for c in instance.clusters)
        instance = replace(instance, clusters=free)
        found = solve_joint_powers(instance, matches)
        seconds = [
            instance.steps * m.choice.pipeline_s
            + instance.upload_bits(n, m.choice.m) / float(instance.uplink_rate(n, p, m.channel))
            for n, (m, p) in enumerate(zip(matches, found.power_w, strict=True))
        ]
        # All of them end with the slowest: with less power the round would take longer.
        np.testing.assert_allclose(seconds, max(seconds), rtol=1e-6)


def test_the_same_round_has_the_same_powers_after_any_other_rounds():
    generator = np.random.default_rng(23)
    _, first, matches, _ = planned(generator, num_clusters=3, num_channels=3)
    before = solve_joint_powers(first, matches)
    for _ in range(5):
        _, other, others, _ = planned(generator, num_clusters=3, num_channels=3)
        solve_joint_powers(other, others)
    assert solve_joint_powers(first, matches) == before


def test_a_channel_on_which_no_power_will_do_is_refused_by_its_cluster():
    _, instance, matches, _ = planned(np.random.default_rng(25), num_clusters=3, num_channels=3)
    number = next(n for n, match in enumerate(matches) if match)
    silent = [
        replace(c, up=replace(c.up, eps_max=1e-300)) if n == number else c for n, c in enumerate(instance.clusters)
    ]
    with pytest.raises(ValueError, match=f"cluster {number}: expected a channel on which some power meets"):
        solve_joint_powers(replace(instance, clusters=tuple(silent)), matches)


def test_a_limit_of_programs_is_told():
    generator = np.random.default_rng(24)
    while True:
        _, instance, matches, _ = planned(generator)
        found = solve_joint_powers(instance, matches)
        if found.iterations > 3:
            break
    stopped = solve_joint_powers(instance, matches, max_iterations=2)
    assert (stopped.status, stopped.iterations) == ("stopped", 2) and stopped.residual > 1e-9
