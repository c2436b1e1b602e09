"""Gain of token slices where the batch bounds m: a causal model at T = 512, S = 4, b = 4, on the virtual clock.

``steps``: networks of a scenario. The best plan without slices is sought over every m and schedule: for each m the
certified segments of least pipeline time, each under every schedule that fits the devices' memory, by the event
simulator. A network counts where that plan has m = b in all clusters. On the same plan the planner then decides on
slices and schedule; a network's step is that of its slowest cluster.
``passes``: one TEB for real, whole and in slices: seconds of processor time and stored bytes.

    python benchmarks/token_slices.py [--networks 10] [--out docs/results/token-slices] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import sized_config, spec_from_config
from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import CAUSAL_LM, LoraConfig, ModelSpec
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage, StepOrder
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.costs import model_costs
from client_pipeline.system.scenario import Scenario, load_scenario
from experiments.base.results import write_table
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.dssda.segments import segment_table
from strategies.planning.pipeline_choices import AUTO_SLICES, PipelineChoices
from strategies.planning.schedule_choice import best_schedule, simulated_seconds

LENGTH, NUM_SEGMENTS, BATCH_SIZE = 512, 4, 4
SCENARIOS = ("physical", "table2")
OVERHEADS_S = (0.002, 0.02, 0.2, 1.0)
"""Seconds of a TEB for a slice beside its FLOP, and of a message beside its bits, both directions together."""
ROWS, PASSES = "results.csv", "passes.csv"


def model(num_layers: int = 12, **more: Any) -> ModelSpec:
    """Sizes of a block of SmolLM2-135M, whose heads of keys and values are shared by three of queries."""
    config = sized_config(
        "llama",
        vocab_size=512,
        width=576,
        num_heads=9,
        key_value_heads=3,
        feed_forward=1536,
        num_layers=num_layers,
        dropout=0.0,
        max_length=1024,
        pad_id=0,
        bos_id=1,
        eos_id=2,
    )
    return replace(spec_from_config(config, CAUSAL_LM, server_layers=0), **more)


MODELS = {"all weights": model(), "adapters": model(lora=LoraConfig(rank=8))}


def best_whole(instance: Instance, cluster: int) -> ClusterPlan | None:
    """Find the plan of least simulated time without slices, over every m and schedule; None if none fits."""
    seconds, plans = simulated_seconds(instance), []
    speed = [device.phi * device.f for device in instance.clusters[cluster].devices]
    # A TEB keeps a batch, as under GPipe, or at least one micro-batch; which schedules fit is asked for each plan.
    for m in instance.m_set:
        for held in (1.0, 1 / m):
            part = replace(instance, gamma0=instance.gamma0 - instance.gamma_act * (1 - held), m_set=(m,))
            for choice in segment_table(part, cluster).choices.values():
                plan = ClusterPlan(delta=choice.delta, order=choice.order(speed), m=m)
                plans.append(best_schedule(instance, cluster, plan, PipelineChoices.of("auto"), seconds))
    return min((p for p in plans if p), key=lambda p: seconds(cluster, p), default=None)


def network_row(scenario: Scenario, instance: Instance) -> dict[str, Any] | None:
    """A network with and without slices; None where the best m is not b, or there is no plan."""
    seconds, whole, cut = simulated_seconds(instance), {}, {}
    for n in range(instance.num_clusters):
        plan = best_whole(instance, n)
        if plan is None or plan.m != instance.b:
            return None
        whole[n] = plan
        cut[n] = best_schedule(instance, n, plan, PipelineChoices.of("auto", 0), seconds) or plan
    slowest = max(whole, key=lambda n: seconds(n, whole[n]))
    whole_s, cut_s = (max(seconds(n, plan) for n, plan in plans.items()) for plans in (whole, cut))
    return {
        "seed": scenario.seed,
        "S": len(whole[slowest].devices),
        "m": whole[slowest].m,
        "schedule": whole[slowest].schedule,
        "whole_s": whole_s,
        "slices": "-".join(str(plan.token_slices) for plan in cut.values()),
        "schedule_cut": cut[slowest].schedule,
        "cut_s": cut_s,
        "change": cut_s / whole_s - 1,
        **{
            f"gpipe_{number}_s": max(
                seconds(n, replace(plan, schedule="gpipe", token_slices=number)) for n, plan in whole.items()
            )
            for number in AUTO_SLICES
        },
    }


def step_rows(networks: int, seeds: int) -> Iterator[dict[str, Any]]:
    """The first networks of each setting whose best m is b, and how many were looked at for them."""
    for name in SCENARIOS:
        for weights, spec in MODELS.items():
            costs = model_costs(spec, sequence_length=LENGTH, batch_size=BATCH_SIZE)
            for overhead_s in OVERHEADS_S:
                counted = 0
                for seed in range(seeds):
                    if counted == networks:
                        break
                    scenario = load_scenario(name, seed)
                    settings = replace(
                        scenario.planner,
                        num_blocks=family_named(spec.family).num_blocks(spec),
                        batch_size=BATCH_SIZE,
                        max_micro_batches=BATCH_SIZE,
                        energy="none",
                    )
                    scenario = replace(scenario, planner=settings, costs=replace(costs, t0=overhead_s, lat=overhead_s))
                    instance = round_instance(
                        scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters)
                    )
                    instance = replace(instance, S_min=NUM_SEGMENTS, S_max=NUM_SEGMENTS)
                    if (row := network_row(scenario, instance)) is not None:
                        counted += 1
                        yield {"scenario": name, "weights": weights, "overhead_s": overhead_s, **row}


def pass_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """Processor time of the passes of one TEB over a sample of T tokens, and what is stored; medians."""
    step, mask_BT = StepId(seed=0, round=1, step=1, cluster=0), torch.ones(1, LENGTH, dtype=torch.bool)
    for weights, spec in ((name, model(1, lora=spec.lora)) for name, spec in MODELS.items()):
        parts, stage = build_parts(spec, seed=0), Stage(spec, OptimizerConfig(name="sgd"))
        stage.place(0, MovedBlock(block_weights(parts.weights(), 0), frozen=block_weights(parts.frozen_weights(), 0)))
        x_BTD, gradient_BTD = (torch.randn(1, LENGTH, 576) for _ in range(2))
        for number in AUTO_SLICES:
            order = StepOrder(step=step, schedule="gpipe", sizes=[1], mask_BT=mask_BT, width=576, num_slices=number)
            lengths = [length for _, length, _ in order.shapes()]
            times: dict[str, list[float]] = {"forward": [], "backward": []}
            stored = 0
            for _ in range(repeats):
                masks, marks = order.masks(), [time.thread_time()]
                for q, x in enumerate(x_BTD.split(lengths, dim=1)):
                    stage.forward(step, q, x.clone(), masks[q])
                marks.append(time.thread_time())
                stored = max(stored, stage.activations.stored_bytes)
                for q, gradient in reversed(list(enumerate(gradient_BTD.split(lengths, dim=1)))):
                    stage.backward(step, q, gradient, masks[q])
                marks.append(time.thread_time())
                for name, seconds in zip(times, np.diff(marks), strict=True):
                    times[name].append(float(seconds))
            yield {
                "weights": weights,
                "slices": number,
                **{f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()},
                "stored_bytes": stored,
            }


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Summarise each setting: networks, shorter steps, the gain, and the numbers of slices taken."""
    for key in dict.fromkeys((row["scenario"], row["weights"], row["overhead_s"]) for row in rows):
        some = [row for row in rows if (row["scenario"], row["weights"], row["overhead_s"]) == key]
        changes = [row["change"] for row in some]
        taken = [int(number) for row in some for number in row["slices"].split("-")]
        yield {
            **dict(zip(("scenario", "weights", "overhead_s"), key, strict=True)),
            "networks": len(some),
            "shorter": sum(change < -1e-9 for change in changes),
            "mean_change": statistics.mean(changes),
            "least_change": max(changes),
            "most_change": min(changes),
            "taken": {str(number): taken.count(number) for number in AUTO_SLICES},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=10, help="of each setting")
    parser.add_argument("--seeds", type=int, default=40, help="most that are looked at for them")
    parser.add_argument("--repeats", type=int, default=15, help="of the TEB's passes")
    parser.add_argument("--out", type=Path, default=Path("docs/results/token-slices"))
    parser.add_argument("--json", action="store_true", help="print one object to standard output and nothing else")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = list(step_rows(arguments.networks, arguments.seeds))
    write_table(rows, arguments.out / ROWS)
    passes = list(pass_rows(arguments.repeats))
    write_table(passes, arguments.out / PASSES)
    settings = list(summary(rows))
    if arguments.json:
        print(json.dumps({"settings": settings, "passes": passes}))
        return
    print("scenario  weights      overhead  networks  shorter  mean      least     most      1, 2, 4, 8 slices")
    for row in settings:
        print(
            f"{row['scenario']:<8}  {row['weights']:<11}  {row['overhead_s']:>6g} s  {row['networks']:>8}  "
            f"{row['shorter']:>7}  {row['mean_change']:+8.1%}  {row['least_change']:+8.1%}  {row['most_change']:+8.1%}"
            f"  {', '.join(str(count) for count in row['taken'].values())}"
        )
    for row in passes:
        print(
            f"{row['weights']:<11}  {row['slices']} slices: forward {row['forward_ms']:.1f} ms, backward "
            f"{row['backward_ms']:.1f} ms, stored {row['stored_bytes'] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
