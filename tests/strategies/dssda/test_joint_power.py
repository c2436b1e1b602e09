"""The powers of a whole round by convex programs, against a search over deadlines and powers."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import matches_of, random_instance
from strategies.dssda.evaluation import score, violations
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.paper.joint_power import solve_joint_powers
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
            matches = matches_of(answer)
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


def test_a_channel_on_which_no_power_will_do_is_refused_by_its_cluster():
    _, instance, matches, _ = planned(np.random.default_rng(25), num_clusters=3, num_channels=3)
    number = next(n for n, match in enumerate(matches) if match)
    silent = [
        replace(c, up=replace(c.up, eps_max=1e-300)) if n == number else c for n, c in enumerate(instance.clusters)
    ]
    with pytest.raises(ValueError, match=f"cluster {number}: expected a channel on which some power meets"):
        solve_joint_powers(replace(instance, clusters=tuple(silent)), matches)


def test_where_power_costs_nothing_the_least_that_keeps_the_latency_is_taken():
    """Be it that the distortion has no weight or that there is none."""
    _, instance, matches, _ = planned(np.random.default_rng(26), num_clusters=2, num_channels=2, V=1.0)
    powers = []
    for weight, scale in ((0.0, 0.2), (1.0, 0.0), (0.0, 0.0)):
        clusters = tuple(
            replace(c, wP=0.0, wE=0.0, wG=weight, up=replace(c.up, C=scale, eps_max=None)) for c in instance.clusters
        )
        free = replace(instance, clusters=clusters, wJ=0.0)
        found = solve_joint_powers(free, matches)
        assert found.status == "converged"
        powers.append(found.power_w)
        late, less = [
            [part.uplink_s + free.steps * part.choice.pipeline_s for part in answer.clusters]
            for answer in (
                score(
                    free, [replace(m, power_w=p * f) for m, p in zip(matches, found.power_w, strict=True)], "feasible"
                )
                for f in (1.0, 0.99)
            )
        ]
        # Both end together, or one has its largest power: with less of any the round would be longer.
        assert min(less) > max(late) * (1 - 1e-6) and max(less) > max(late)
    assert powers[1] == pytest.approx(powers[0], rel=1e-6) and powers[2] == pytest.approx(powers[0], rel=1e-6)
