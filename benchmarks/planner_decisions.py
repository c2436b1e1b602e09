"""Effect and cost of the planner's further decisions: activations that go up, a divided band, prices, powers.

``dssda``'s plans for some networks of each scenario; a row for each network and setting, means over its rounds. Seconds
of planning are the processor's, on one thread.

1. ``activations``: z_enc of Eq. (11) in the upload, beside the scenario without them.
2. ``bandwidth``: one round with a channel for each matched cluster, and with a band that they divide; with empty queues
   (Y = 0) and with queues drawn from 0.5 to 0.8.
3. ``price``: rounds at rising prices of a joule.
4. ``powers``: the round's plan, and the convex programs beside it; the first round, which imports CVXPY, is left out.

    python benchmarks/planner_decisions.py [--networks 3] [--first 0] [--out docs/results/planner-decisions]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario, load_scenario
from experiments.base.results import write_table
from strategies.dssda.paper.power_control import control_power
from strategies.dssda.planner import plan_round
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import DSSDA

ROWS = "results.csv"
WITH_ACTIVATIONS = ("table2", "table2-activations", "table2-bert", "table2-bert-activations")
DIVIDED = (
    ("table2", False),
    ("table2", True),
    ("table2-contended", False),
    ("table2-contended", True),
    ("physical", True),
)
"""Scenario, and whether its queues are filled."""
PRICES = (0.0, 0.1, 1.0, 3.0)
PRICED = ("table2", "table2-contended")
BY_PROGRAMS = ("default", "physical", "city")
ROUNDS = {"activations": 12, "price": 4, "powers": 12}


def with_planner(scenario: Scenario, **changes: Any) -> Scenario:
    """Return the scenario with other settings of its planner."""
    return replace(scenario, planner=replace(scenario.planner, **changes))


def planned(scenario: Scenario, num_rounds: int) -> dict[str, float]:
    """Means over the rounds: delay [s], energy [J], processor milliseconds of a round."""
    begun = time.process_time()
    rounds = list(plan_rounds(scenario, DSSDA(), num_rounds))
    spent = time.process_time() - begun
    return {
        "latency_s": statistics.mean(r.latency_s for r in rounds),
        "energy_j": statistics.mean(r.costs.energy_j for r in rounds),
        "planning_ms": 1e3 * spent / num_rounds,
        "gap": max(r.answer.gap or 0.0 for r in rounds),
    }


def activation_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Rounds with and without activations in the upload."""
    for name in WITH_ACTIVATIONS:
        means = planned(load_scenario(name, seed), ROUNDS["activations"])
        yield {"question": "activations", "scenario": name, "setting": "", "seed": seed, **means}


def bandwidth_rows(seed: int) -> Iterator[dict[str, Any]]:
    """The first round of a network with channels, and with a band to divide."""
    for name, filled in DIVIDED:
        base = load_scenario(name, seed)
        queues = Queues.empty(base.num_clusters)
        if filled:
            queues = replace(queues, virtual=np.random.default_rng(seed).uniform(0.5, 0.8, base.num_clusters))
        for bandwidth in ("channels", "split"):
            scenario = with_planner(base, bandwidth=bandwidth)
            instance = round_instance(scenario, NetworkTrace(scenario).round(1), queues)
            begun = time.process_time()
            answer = plan_round(instance)
            yield {
                "question": "bandwidth",
                "scenario": name,
                "setting": f"{bandwidth}, {'queues' if filled else 'Y = 0'}",
                "seed": seed,
                "planning_ms": 1e3 * (time.process_time() - begun),
                "gap": answer.gap,
                "objective": answer.objective,
            }


def price_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Rounds at each price of a joule."""
    for name in PRICED:
        for price in PRICES:
            means = planned(with_planner(load_scenario(name, seed), energy_price=price), ROUNDS["price"])
            yield {"question": "price", "scenario": name, "setting": f"{price:g}", "seed": seed, **means}


def power_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Time of the plan and of the programs beside it, medians over the rounds after the first."""
    for name in BY_PROGRAMS:
        scenario = load_scenario(name, seed)
        times = []
        for round_ in plan_rounds(scenario, DSSDA(), ROUNDS["powers"]):
            begun = time.process_time()
            answer = plan_round(round_.instance)
            between = time.process_time()
            _, control = control_power(round_.instance, answer)
            times.append((between - begun, time.process_time() - between, control.iterations if control else 0))
        plan_s, programs_s, iterations = zip(*times[1:], strict=True)
        yield {
            "question": "powers",
            "scenario": name,
            "setting": "sca",
            "seed": seed,
            "planning_ms": 1e3 * statistics.median(plan_s),
            "programs_ms": 1e3 * statistics.median(programs_s),
            "most_programs": max(iterations),
        }


def rows(seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """All rows of some networks."""
    names = ("question", "scenario", "setting", "seed")
    columns = ("latency_s", "energy_j", "planning_ms", "programs_ms", "most_programs", "gap", "objective")
    for seed in seeds:
        for part in (activation_rows, bandwidth_rows, price_rows, power_rows):
            for row in part(seed):
                yield {key: row[key] for key in names} | {key: row.get(key) for key in columns}


def report(table: Sequence[dict[str, Any]]) -> str:
    """Means over the networks, with their spread."""
    lines = []
    for question, scenario, setting in dict.fromkeys((r["question"], r["scenario"], r["setting"]) for r in table):
        some = [r for r in table if (r["question"], r["scenario"], r["setting"]) == (question, scenario, setting)]
        figures = []
        for key in ("latency_s", "energy_j", "objective", "planning_ms", "programs_ms", "most_programs", "gap"):
            values = [r[key] for r in some if r[key] is not None]
            if key in ("gap", "most_programs") and values:
                figures.append(f"{key} at most {max(values):.2g}")
            elif values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                figures.append(f"{key} {statistics.mean(values):.4g} ± {spread:.2g}")
        lines.append(f"{question:<12} {scenario:<24} {setting:<18} {'; '.join(figures)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--out", type=Path, default=Path("docs/results/planner-decisions"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table: list[dict[str, Any]] = []
    for row in rows(range(arguments.first, arguments.first + arguments.networks)):
        table.append(row)
        write_table(table, arguments.out / ROWS)
    print(report(table))


if __name__ == "__main__":
    main()
