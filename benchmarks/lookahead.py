"""What does looking ahead gain? DSSDA with windows of 1, 2 and 4 rounds over the same networks, at the same bound.

V weighs delay against the bound, so a smaller delay alone says nothing: DSSDA runs with several V, and its delay is
read off at the bound that the window reaches (between the two next V, linearly). The bound is the mean Gamma of the
cluster that has most. ``wrong`` forecasts are other draws of the same network: what a window loses by them.

    python benchmarks/lookahead.py [--networks 3] [--rounds 40] [--out docs/results/lookahead]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from flower_app.experiments.results import write_table
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import DSSDA

SCENARIO, V = "table2-contended", 0.1
MYOPIC_V = (0.03, 0.05, 0.1, 0.2, 0.4)
WINDOWS = ((2, "true"), (4, "true"), (4, "wrong"))
ROWS = "results.csv"


def row(seed: int, v: float, lookahead: int, forecast: str, num_rounds: int) -> dict[str, Any]:
    """Plan a network's rounds; delay, bound and the window's gap, means over the rounds."""
    scenario = load_scenario(SCENARIO, seed)
    scenario = replace(scenario, planner=replace(scenario.planner, v=v))
    wrong = NetworkTrace(scenario, seed=1).round if forecast == "wrong" else None
    begun = time.process_time()
    rounds = list(plan_rounds(scenario, DSSDA(), num_rounds, lookahead=lookahead, forecast=wrong))
    windows = [r.decision.window for r in rounds if r.decision.window is not None]
    return {
        "seed": seed,
        "v": v,
        "lookahead": lookahead,
        "forecast": forecast,
        "rounds": num_rounds,
        "latency_s": statistics.mean(r.latency_s for r in rounds),
        "largest_gamma": float(np.mean([r.gamma for r in rounds], axis=0).max()),
        "window_gap": statistics.mean(w.gap for w in windows) if windows else 0.0,
        "planning_s": (time.process_time() - begun) / num_rounds,
    }


def rows(seeds: Sequence[int], num_rounds: int) -> Iterator[dict[str, Any]]:
    """All rows of some networks."""
    for seed in seeds:
        for v in MYOPIC_V:
            yield row(seed, v, 1, "true", num_rounds)
        for lookahead, forecast in WINDOWS:
            yield row(seed, V, lookahead, forecast, num_rounds)


def delay_at(myopic: Sequence[dict[str, Any]], gamma: float) -> float:
    """DSSDA's delay at a bound, between its two next V; that of the last one beyond them [s]."""
    points = sorted((float(r["largest_gamma"]), float(r["latency_s"])) for r in myopic)
    return float(np.interp(gamma, *zip(*points, strict=True)))


def report(table: Sequence[dict[str, Any]]) -> str:
    """Mean change of the delay at the same bound, for each window."""
    lines = ["window  forecast  delay at the same bound     gap of the window  s a round"]
    for lookahead, forecast in WINDOWS:
        some = [r for r in table if (int(r["lookahead"]), r["forecast"]) == (lookahead, forecast)]
        changes = []
        for r in some:
            myopic = [other for other in table if other["seed"] == r["seed"] and int(other["lookahead"]) == 1]
            changes.append(float(r["latency_s"]) / delay_at(myopic, float(r["largest_gamma"])) - 1)
        spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
        gap = statistics.mean(float(r["window_gap"]) for r in some)
        seconds = statistics.mean(float(r["planning_s"]) for r in some)
        lines.append(
            f"{lookahead:>6}  {forecast:<8}  {statistics.mean(changes):+7.1%} ± {spread:.1%} ({len(some)} networks)  "
            f"{gap:>17.1%}  {seconds:9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/results/lookahead"))
    parser.add_argument("--report", action="store_true", help="of the rows that are there; plan nothing")
    arguments = parser.parse_args()
    if not arguments.report:
        arguments.out.mkdir(parents=True, exist_ok=True)
        seeds = range(arguments.first, arguments.first + arguments.networks)
        write_table(list(rows(seeds, arguments.rounds)), arguments.out / ROWS)
    with (arguments.out / ROWS).open(encoding="utf-8") as file:
        print(report(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
