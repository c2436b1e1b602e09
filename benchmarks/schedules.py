"""Gain of a schedule: GPipe, 1F1B and ZB-H1 under the certified plans, and the cost of a cut backward pass here.

``plans``: networks of a scenario, one round each; the certified plan of each cluster runs under every schedule on the
event simulator, with half of a backward pass for the weights, and with none of it (frozen weights under adapters).
``model``: one TEB of BERT-base's width for real: seconds and stored bytes of a backward pass in one part, and in two.

    python benchmarks/schedules.py [--networks 20] [--out docs/results/schedules]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.schedules import SCHEDULES
from experiments.base.results import write_table
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA
from strategies.planning.schedule_choice import simulated_seconds

SCENARIOS = ("table2", "table2-bert", "physical", "unequal")
SHARES = {"all weights": None, "frozen": 0.0}
ROWS, MODEL_ROWS = "results.csv", "model.csv"


def planned_rows(name: str, networks: int) -> Iterator[dict[str, Any]]:
    """A row for each cluster that trains: the seconds of a step under each schedule."""
    for seed in range(networks):
        scenario = load_scenario(name, seed)
        for weights, share in SHARES.items():
            costs = scenario.costs if share is None else dataclasses.replace(scenario.costs, weight_share=share)
            decision = RoundPlanner(
                dataclasses.replace(scenario, costs=costs), DSSDA(), power_control="exact", schedule="auto"
            ).plan(1, [1.0] * scenario.num_clusters)
            seconds = simulated_seconds(decision.instance)
            for n, plan in enumerate(decision.plans):
                if plan.selected:
                    times = {s: seconds(n, dataclasses.replace(plan, schedule=s)) for s in SCHEDULES}
                    yield {
                        "scenario": name,
                        "weights": weights,
                        "seed": seed,
                        "cluster": n,
                        "S": len(plan.devices),
                        "m": plan.m,
                        "auto": plan.schedule,
                        **{f"{s}_s": t for s, t in times.items()},
                    }


def model_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """Processor time of the passes of one TEB (width 768, 8 samples of 64 tokens), and what is stored; medians."""
    base = transformer.spec(
        vocab_size=64, width=768, num_heads=12, feed_forward=3072, encoder_layers=1, decoder_layers=1, max_length=64
    )
    step = StepId(seed=0, round=1, step=1, cluster=0)
    mask = torch.ones(8, 64, dtype=torch.bool)
    x, gradient = torch.randn(8, 64, 768), torch.randn(8, 64, 768)
    for weights, spec in (
        ("all weights", base),
        ("frozen", dataclasses.replace(base, lora=LoraConfig(rank=8, alpha=16.0))),
    ):
        parts = build_parts(spec, seed=0)
        stage = Stage(spec, OptimizerConfig(name="sgd"))
        stage.place(0, MovedBlock(block_weights(parts.weights(), 0), frozen=block_weights(parts.frozen_weights(), 0)))
        for splits in (False, True):
            times: dict[str, list[float]] = {"F": [], "B": [], "W": []}
            stored = waiting = 0
            for _ in range(repeats):
                marks = [time.thread_time()]
                stage.forward(step, 0, x.clone(), mask, splits=splits)
                marks.append(time.thread_time())
                stored = max(stored, stage.activations.stored_bytes)
                stage.backward(step, 0, gradient, mask)
                marks.append(time.thread_time())
                waiting = max(waiting, stage.activations.stored_bytes)
                if splits:
                    stage.backward_weights(0)
                marks.append(time.thread_time())
                for kind, seconds in zip("FBW", np.diff(marks), strict=True):
                    times[kind].append(float(seconds))
            yield {
                "weights": weights,
                "backward": "two parts" if splits else "one part",
                **{f"{kind}_ms": 1000 * statistics.median(values) for kind, values in times.items()},
                "stored_bytes": stored,
                "waiting_bytes": waiting,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=20, help="of each scenario")
    parser.add_argument("--repeats", type=int, default=15, help="of the model's passes")
    parser.add_argument("--out", type=Path, default=Path("docs/results/schedules"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = [row for name in SCENARIOS for row in planned_rows(name, arguments.networks)]
    write_table(rows, arguments.out / ROWS)
    measured = list(model_rows(arguments.repeats))
    write_table(measured, arguments.out / MODEL_ROWS)
    print("scenario      weights      clusters  1f1b      zb-h1     auto      chosen (gpipe, 1f1b, zb-h1)")
    for name in SCENARIOS:
        for weights in SHARES:
            some = [row for row in rows if (row["scenario"], row["weights"]) == (name, weights)]
            gains = {
                s: statistics.mean(row[f"{row['auto'] if s == 'auto' else s}_s"] / row["gpipe_s"] - 1 for row in some)
                for s in (*SCHEDULES[1:], "auto")
            }
            chosen = [sum(row["auto"] == s for row in some) for s in SCHEDULES]
            changes = "  ".join(f"{gain:+8.1%}" for gain in gains.values())
            print(f"{name:<12}  {weights:<11}  {len(some):>8}  {changes}  {chosen}")
    for row in measured:
        print(
            f"{row['weights']:<11}  {row['backward']:<9}  F {row['F_ms']:.1f} ms, B {row['B_ms']:.1f} ms, "
            f"W {row['W_ms']:.1f} ms; stored {row['stored_bytes'] / 1e6:.1f} MB, after B "
            f"{row['waiting_bytes'] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
