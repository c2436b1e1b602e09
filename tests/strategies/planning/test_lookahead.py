"""The window of forecast rounds against all combinations of all decisions, and what its prices do to the plans."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario, parse_scenario
from helpers.oracles import all_matchings, best_pipelines
from strategies.dssda.instance_file import instance_to_dict
from strategies.dssda.planner import plan_round
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.dry_run import plan_rounds
from strategies.planning.lookahead import window_cost, window_prices
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA, make_policy


def small(seed, channels=1, v=0.05):
    """Two clusters of three devices, few TEBs: every decision can be tried."""
    raw = {
        "format": "collapipe-scenario/1",
        "clusters": 2,
        "devices": 3,
        "channels": channels,
        "seed": seed,
        "device": {
            "flop-per-cycle": {"min": 10.0, "max": 24.0},
            "frequency-ghz": {"min": 0.1, "max": 0.8},
            "memory-gb": {"min": 0.8, "max": 2.0},
        },
        "block": {"memory-gb": 0.375},
        "planner": {"blocks": 4, "batch-size": 8, "max-micro-batches": 3, "v": v, "gamma-max": 3.0},
    }
    return parse_scenario(raw, "small")


def decisions(scenario, network):
    """Cost and Gamma of every decision of a round: matchings, sizes; the power is the largest that C6 and C8 allow.

    More power makes the upload faster and the distortion smaller, and nothing dearer.
    """
    free = round_instance(scenario, network, Queues.empty(scenario.num_clusters))
    raw, settings = instance_to_dict(free), scenario.planner
    pipelines = [best_pipelines(raw, n) for n in range(len(raw["clusters"]))]
    found = []
    for channel_of in all_matchings(len(raw["clusters"]), scenario.num_channels):
        matched = [n for n, j in enumerate(channel_of) if j is not None]
        for sizes in itertools.product(*(pipelines[n] for n in matched)):
            gamma, seconds = [], 0.0
            for cluster in raw["clusters"]:
                interference = float(np.mean(cluster["I"]))
                gamma.append(settings.g0 * (settings.phi**2 + settings.distortion_scale / interference))
            for n, size in zip(matched, sizes, strict=True):
                cluster, j = raw["clusters"][n], channel_of[n]
                up, h, i, b = cluster["up"], cluster["h"][j], cluster["I"][j], cluster["B"][j]

                def rate(p, h=h, i=i, b=b):
                    return b * math.log2(1 + p * h / (i + b * raw["N0"]))

                power = up["Pmax"]
                low, high = 0.0, power
                if up["e_bits"] * power / rate(power) > up["Emax"]:
                    for _ in range(80):
                        power = (low + high) / 2
                        low, high = (power, high) if up["e_bits"] * power / rate(power) <= up["Emax"] else (low, power)
                seconds = max(seconds, raw["steps"] * pipelines[n][size] + up["t_bits"] / rate(power))
                distortion = settings.distortion_scale / (power * h + i)
                gamma[n] = settings.g0 * (settings.phi**2 * (size**2 / raw["L"] + 1) + distortion)
            found.append((settings.v * seconds, np.array(gamma)))
    return found


def cost_of_all(costs_and_gammas, queue, gamma_max):
    total = 0.0
    for cost, gamma in costs_and_gammas:
        total += cost
        queue = [max(y + g - gamma_max, 0.0) for y, g in zip(queue, gamma, strict=True)]
    return total + sum(y * y for y in queue) / 2


def certified(scenario):
    return lambda network, prices: plan_round(round_instance(scenario, network, prices))


@pytest.mark.parametrize("rounds", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_windows_bound_and_plans_stand_around_the_best_of_all_combinations(rounds):
    generator, excess = np.random.default_rng(rounds), []
    for seed in range(12 // rounds):
        scenario = small(seed, channels=1 + seed % 2, v=float(10 ** generator.uniform(-2, 0)))
        networks = [NetworkTrace(scenario).round(t) for t in range(1, rounds + 1)]
        queues = replace(Queues.empty(2), virtual=generator.uniform(0.0, 4.0, 2))
        lists = [decisions(scenario, network) for network in networks]
        best = min(
            cost_of_all(chosen, queues.virtual, scenario.planner.gamma_max) for chosen in itertools.product(*lists)
        )
        window = window_prices(scenario, networks, queues, certified(scenario))
        assert window.lower_bound <= best * (1 + 1e-6)
        assert window.objective >= best * (1 - 1e-6)
        assert window.rounds == rounds and window.gap >= 0
        excess.append(window.objective / best - 1)
    # Prices that are the same in all rounds reach most of the best combinations, and none is far away.
    assert np.mean(np.array(excess) < 1e-6) >= 0.5
    assert max(excess) < 0.1


def test_the_cost_of_a_window_counts_queues_that_never_fall_below_zero():
    rounds = [(1.0, np.array([0.0, 5.0])), (2.0, np.array([4.0, 3.0]))]
    # [1, 0]: the first falls to 0 and rises by 1; the second rises by 2 and stays.
    assert window_cost(rounds, np.array([1.0, 0.0]), 3.0) == pytest.approx(3.0 + (1 + 4) / 2)


def test_the_round_is_the_certified_optimum_at_the_windows_prices():
    scenario = small(3)
    planner = RoundPlanner(scenario, DSSDA(), lookahead=3, power_control="exact")
    for number in range(1, 5):
        decision = planner.plan(number, [1.0, 1.0])
        window = decision.window
        prices = replace(decision.queues, virtual=window.prices)
        expected = plan_round(round_instance(scenario, decision.network, prices))
        assert decision.answer == expected and decision.answer.status == "optimal"
        # What is owed is what happened, not what it cost.
        before = planner.queues.virtual
        gamma = planner.settle(decision)
        assert planner.queues.virtual == pytest.approx(np.maximum(before + gamma - scenario.planner.gamma_max, 0.0))


@pytest.mark.slow
def test_looking_ahead_is_no_dearer_where_it_is_judged_by_what_it_minimises():
    """Closed loop: delay times V, and half of the squared queues at the end, over networks."""

    def total(scenario, lookahead):
        rounds = list(plan_rounds(scenario, DSSDA(), 12, lookahead=lookahead))
        last = rounds[-1].queues.virtual + rounds[-1].gamma - scenario.planner.gamma_max
        after = np.maximum(last, 0.0)
        return scenario.planner.v * sum(r.latency_s for r in rounds) + float(after @ after) / 2

    myopic, ahead = zip(*((total(small(s), 1), total(small(s), 3)) for s in range(3)), strict=True)
    assert sum(ahead) < sum(myopic)


def test_a_window_in_which_a_round_has_no_plan_says_nothing():
    scenario = small(0)
    none = replace(
        scenario, clusters=tuple(tuple(replace(d, memory=1.0) for d in devices) for devices in scenario.clusters)
    )
    network = NetworkTrace(none).round(1)
    assert window_prices(none, [network], Queues.empty(2), certified(none)) is None


def test_a_forecast_may_come_from_elsewhere():
    scenario = small(1)
    asked = []

    def forecast(number):
        asked.append(number)
        return NetworkTrace(scenario, seed=5).round(number)

    planner = RoundPlanner(scenario, DSSDA(), lookahead=3, forecast=forecast, power_control="exact")
    planner.plan(7, [1.0, 1.0])
    assert asked == [8, 9]


def test_what_has_no_use_for_a_window_is_refused():
    with pytest.raises(ValueError, match=r"planner.lookahead: 3 rounds need a policy that weighs the bound"):
        RoundPlanner(load_scenario("table2"), make_policy("delay-only"), lookahead=3)
