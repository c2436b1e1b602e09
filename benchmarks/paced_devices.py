"""Does the model tell how long a round takes? Paced devices against the event simulator, over a dozen plans.

One cluster of the scenario trains for real: Ray actors, gloo between them, a control unit with embedding and decoder.
Each device takes the time that its profile says, scaled; the prediction is the event simulator's, on the same action
lists, plus the upload. What the model leaves out (embedding, decoder, the runtime itself) is the error. A warm-up step
of each plan starts actors and connections.

    python benchmarks/paced_devices.py [--scenario table2] [--time-scale 0.05] [--steps 2] [--schedule zb-h1] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from functools import partial
from typing import Any

from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray

# Ray reads its settings when it is imported.
prepare_private_ray()

import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.actors import start_control_unit, train_round
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.event_simulator import simulate_pipeline
from client_pipeline.timetable.pacing import Pace
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.plan_demands import plan_times

PLANS = [
    # delta by speed rank (fastest first), m, schedule
    ([4], 1, "gpipe"),
    ([4], 8, "gpipe"),
    ([3, 1], 2, "gpipe"),
    ([2, 2], 16, "gpipe"),
    ([4, 3, 1], 4, "gpipe"),
    ([4, 4, 4], 11, "gpipe"),
    ([4, 4, 4], 11, "1f1b"),
    ([5, 4, 2, 1], 8, "gpipe"),
    ([4, 3, 3, 2], 14, "gpipe"),
    ([3, 3, 3, 3], 5, "1f1b"),
    ([4, 3, 2, 2, 1], 9, "gpipe"),
    ([3, 3, 2, 2, 2], 16, "gpipe"),
    ([6, 2, 2, 1, 1], 3, "gpipe"),
    ([4, 4, 4], 11, "zb-h1"),
    ([4, 3, 3, 2], 14, "zb-h1"),
    ([3, 3, 2, 2, 2], 16, "zb-h1"),
    ([6, 2, 2, 1, 1], 3, "zb-h1"),
]
"""S from 1 to 5, m from 1 to 16, even and uneven; L is the sum of each."""


class RandomPairs:
    """Token sequences drawn once; short, so that what they cost on this machine hardly counts."""

    def __init__(self, num_examples: int, vocab_size: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, vocab_size, (num_examples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def collate(self, indices: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
        rows = self.tokens[indices]
        mask = torch.ones_like(rows, dtype=torch.bool)
        return {"input_ids": rows, "attention_mask": mask, "decoder_input_ids": rows, "labels": rows}


def spec(num_blocks: int) -> ModelSpec:
    """A classic Transformer of width 16."""
    return transformer.spec(
        vocab_size=64,
        width=16,
        num_heads=2,
        feed_forward=32,
        encoder_layers=num_blocks,
        decoder_layers=1,
        max_length=16,
    )


def measure(scenario_name: str, scale: float, steps: int, only: str = "") -> list[dict[str, Any]]:
    """Train one round under each plan, or under those of one schedule ``only``."""
    base = load_scenario(scenario_name)
    rows = []
    for number, (parts, m, schedule) in enumerate(PLANS, start=1):
        if only and schedule != only:
            continue
        settings = dataclasses.replace(base.planner, num_blocks=sum(parts), local_steps=1)
        scenario = dataclasses.replace(base, planner=settings)
        instance = round_instance(scenario, NetworkTrace(scenario).round(number), Queues.empty(base.num_clusters))
        devices = instance.device_arrays(0)
        order = [int(k) for k in (-(devices.phi * devices.f)).argsort()[: len(parts)]]
        delta = [0] * len(devices.phi)
        for device, part in zip(order, parts, strict=True):
            delta[device] = part
        plan = ClusterPlan(delta=tuple(delta), order=tuple(order), m=m, schedule=schedule)
        times = plan_times(instance, 0, plan)
        uplink_s = instance.clusters[0].up.t_bits / float(instance.uplink_rate(0, 0.5, 0))
        predicted = scale * (simulate_pipeline(schedule, *times).makespan + uplink_s)
        setup = ClusterSetup(
            run=f"paced-{os.getpid()}-{number}",
            cluster=0,
            spec=spec(sum(parts)),
            optimizer=OptimizerConfig(),
            runtime=RuntimeConfig(),
            seed=0,
            batch_size=instance.b,
            local_steps=1,
            load_data=partial(RandomPairs, 4 * instance.b, 64, 6),
        )
        start_control_unit(setup)
        weights = build_parts(setup.spec, seed=0).weights()
        train_round(setup.run, 0, RoundOrder(round=1, weights=weights, plan=plan), 120.0)
        pace = Pace.of(times, uplink_s, scale)
        measured = []
        for step in range(steps):
            done = train_round(setup.run, 0, RoundOrder(round=2 + step, weights=weights, plan=plan, pace=pace), 120.0)
            measured.append(float(done.report["paced_s"]))
        seconds = statistics.median(measured)
        rows.append(
            {
                "S": len(parts),
                "m": m,
                "delta": parts,
                "schedule": schedule,
                "predicted_s": predicted / scale,
                "measured_s": seconds / scale,
                "error": seconds / predicted - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="table2")
    parser.add_argument("--time-scale", type=float, default=0.05, help="wall seconds of a virtual second")
    parser.add_argument("--steps", type=int, default=2, help="measured rounds of each plan; their median counts")
    parser.add_argument("--schedule", default="", help="plans of this schedule alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with private_ray(num_cpus=2, namespace="collapipe"):
        rows = measure(arguments.scenario, arguments.time_scale, arguments.steps, arguments.schedule)
    mean = statistics.mean(abs(row["error"]) for row in rows)
    if arguments.json:
        print(json.dumps({"time_scale": arguments.time_scale, "mean_absolute_error": mean, "plans": rows}))
        return
    print("  S   m  schedule  TEBs             predicted s  measured s   error")
    for row in rows:
        teb = "-".join(map(str, row["delta"]))
        print(
            f"{row['S']:>3} {row['m']:>3}  {row['schedule']:<8}  {teb:<15}  {row['predicted_s']:>11.2f}  "
            f"{row['measured_s']:>10.2f}  {row['error']:>+6.2%}"
        )
    print(f"mean absolute error {mean:.2%} over {len(rows)} plans, seconds of virtual time")


if __name__ == "__main__":
    main()
