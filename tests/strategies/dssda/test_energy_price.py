"""A price on joules, against brute force: which segments, channels and powers it buys."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.scenario import load_scenario
from helpers import oracles
from helpers.instances import checked_round, random_instance
from strategies.dssda.evaluation import round_joules
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.paper.power_control import control_power
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import segment_table, solve_segments
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def drawn(generator, **changes):
    raw = random_instance(generator, num_devices=int(generator.integers(1, 4)), **changes)
    raw["wJ"] = float(10 ** generator.uniform(-2.5, 0.5))
    raw["tail_energy"] = str(generator.choice(["link", "none"]))
    raw["act"]["z_enc_bits"] = float(generator.choice([0.0, 3e6]))
    return raw


@pytest.mark.slow
def test_rounds_with_a_price_of_energy_cost_what_brute_force_says():
    generator, planned, frugal = np.random.default_rng(41), 0, 0
    for _ in range(60):
        raw = drawn(generator, num_clusters=int(generator.integers(1, 3)), num_channels=int(generator.integers(1, 3)))
        raw["m_set"] = raw["m_set"][:3]
        raw["L"] = min(raw["L"], 5)
        if (found := checked_round(raw)) is None:
            continue
        instance, answer = found
        controlled, control = control_power(instance, answer)
        assert control.used == "sca" and controlled.objective == pytest.approx(answer.objective, rel=5e-6)
        free = plan_round(replace(instance, wJ=0.0))
        frugal += [c.choice and c.choice.delta for c in free.clusters] != [
            c.choice and c.choice.delta for c in answer.clusters
        ]
        planned += 1
    assert planned > 30 and frugal > 5


def test_joules_are_those_of_all_micro_batches_and_local_steps():
    generator, seen = np.random.default_rng(42), 0
    for _ in range(40):
        raw = drawn(generator, num_clusters=1, num_channels=1)
        instance = parse_instance(raw, "case")
        for choice in segment_table(instance, 0).offered[:5]:
            # Under Eq. (15) every device pays its link, unless the last one is told to pay none.
            last = choice.last if raw["latency"] == "flowshop" or raw["tail_energy"] == "none" else None
            joules = oracles.device_joules(raw, 0, choice.delta, choice.m, last)
            assert round_joules(instance, 0, choice) == pytest.approx(raw["steps"] * sum(joules))
            seen += 1
    assert seen > 20


def test_a_cluster_by_itself_has_the_cheapest_of_all_its_segments():
    generator, solved = np.random.default_rng(43), 0
    for _ in range(20):
        raw = drawn(generator, num_clusters=1, num_channels=1)
        answer, cluster = solve_segments(parse_instance(raw, "case")), raw["clusters"][0]
        choices = oracles.best_pipelines(raw, 0, key_of=oracles._size_bits_and_joules)
        assert (answer.status == "infeasible") == (not choices)
        costs = [
            raw["V"] * raw["steps"] * seconds + cluster["wS"] * s + cluster["wS2"] * s**2 + joules
            for (s, _, joules), seconds in choices.items()
        ]
        if costs:
            assert answer.objective == pytest.approx(min(costs))
            solved += 1
    assert solved > 10


@pytest.mark.slow
def test_time_is_paid_for_joules_as_the_price_rises():
    scenario = load_scenario("table2")
    seconds, joules = [], []
    for price in (0.0, 0.3, 3.0):
        priced = replace(scenario, planner=replace(scenario.planner, energy_price=price))
        rounds = list(plan_rounds(priced, make_policy("dssda"), 3))
        assert all(r.answer.status == "optimal" and r.violations == [] for r in rounds)
        seconds.append(np.mean([r.latency_s for r in rounds]))
        joules.append(np.mean([r.energy_j for r in rounds]))
    assert seconds[0] < seconds[1] < seconds[2] and joules[0] > joules[1] > joules[2]
