"""Excess of Eq. (11) over a streamed round: the printed sum beside a round whose activations stream up.

``dssda``'s plans for the scenarios in which activations go up; the round's delay with event-simulated pipelines as the
sum of its parts, and as the system runs it: uplink, decoder and downlink beside the pipeline.

    python benchmarks/streamed_rounds.py [--rounds 12] [--out docs/results/streamed]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client_pipeline.system.scenario import load_scenario
from experiments.base.results import write_table
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import DSSDA

SCENARIOS = ("table2-activations", "table2-bert-activations", "table2-contended-activations")


def rows(num_rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each round."""
    for name in SCENARIOS:
        for planned in plan_rounds(load_scenario(name), DSSDA(), num_rounds):
            yield {
                "scenario": name,
                "round": planned.number,
                "eq15_s": planned.latency_s,
                "sum_s": planned.costs.latency_s,
                "streamed_s": planned.costs.latency_streamed_s,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("docs/results/streamed"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = list(rows(arguments.rounds))
    write_table(table, arguments.out / "results.csv")
    print("scenario                      Eq. (15)      sum  streamed  change")
    for name in SCENARIOS:
        some = [row for row in table if row["scenario"] == name]
        means = {key: statistics.mean(row[key] for row in some) for key in ("eq15_s", "sum_s", "streamed_s")}
        change = statistics.mean(row["streamed_s"] / row["sum_s"] - 1 for row in some)
        times = "  ".join(f"{value:6.1f} s" for value in means.values())
        print(f"{name:<28}  {times}  {change:+.1%}")


if __name__ == "__main__":
    main()
