"""Gain of the mean of adapters' products over the mean of their factors, with many local steps on unlike data.

Clusters train one after the other in this process, each with optimizer states of its own, and are joined after
``--local-steps``: by ``lora.average`` = ``factors``, or ``products``. No actors, no messages: arithmetic alone. The
head is averaged with them, as under ``decoder-sync = "round"``. A row has the score of the joined model, and over the
rounds the mean of two shares of the norm of what the mean of products changed in a round: the distance of the factors'
means from it, and what the best factors of rank r lack of it.

    python benchmarks/adapter_averaging.py --config trec6-minilm --set data.path=FOLDER \
        --set model.pretrained=FOLDER --set model.trainable=lora --set data.partition=dirichlet \
        --set data.dirichlet-alpha=0.1 --local-steps 1,20,80 --samples 5120 --seeds 3

Rows go to standard output, one JSON object a line; what a file of them makes together, `--table FILE` prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_pipeline.partition.parts import Batch, ModelParts, target_weight, targets
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.control_unit.round_order import TrainingData
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.tasks.base import Prepared, task
from strategies.aggregation.adapter_products import Factors, mean_product, sum_of_products

RULES = ("factors", "products")
_A, _B = ".lora_A.", ".lora_B."


class Cluster:
    """One cluster's data, and the optimizer that remembers its steps."""

    def __init__(self, parts: ModelParts, data: TrainingData, optimizer: OptimizerConfig, order: DataOrder):
        self.parts = parts
        self.data = data
        self.order = order
        self.optimizer = PartOptimizer(dict(parts.named_parameters()), optimizer)
        self.state: dict[str, Tensor] = {}

    def train(self, start: dict[str, Tensor], first_step: int, steps: int) -> tuple[dict[str, Tensor], int]:
        """Train from ``start``; returns the weights and the targets."""
        self.parts.load(start)
        self.optimizer = PartOptimizer(dict(self.parts.named_parameters()), self.optimizer.config)
        self.optimizer.load_state(self.state)
        seen = 0
        for step in range(first_step, first_step + steps):
            batch: Batch = self.data.collate(self.order.next_batch(), seed=step)
            weight = target_weight(targets(batch))
            (self.parts.loss_sum(batch) / weight).backward()
            clip = self.optimizer.config.clip_norm
            self.optimizer.apply(step, clip_scale(clip, self.optimizer.gradient_norm_sq()) if clip else 1.0)
            seen += weight
        self.state = {name: value.clone() for name, value in self.optimizer.state().items()}
        return self.parts.weights(), seen


def joined(
    rule: str, start: dict[str, Tensor], trained: list[dict[str, Tensor]], shares: NDArray[np.float64]
) -> tuple[dict[str, Tensor], float, float]:
    """Join; returns the model, and the two shares that a row has."""
    mean = {
        name: sum((float(w) * weights[name] for w, weights in zip(shares, trained, strict=True)), torch.zeros(()))
        for name in start
    }
    distances, cuts = [], []
    for name_b in [name for name in start if _B in name]:
        name_a = name_b.replace(_B, _A)

        def factors(weights: dict[str, Tensor], pair: tuple[str, str] = (name_b, name_a)) -> Factors:
            return Factors.of(*(weights[name].numpy() for name in pair))

        begun = factors(start)
        terms = [(float(w), factors(weights)) for w, weights in zip(shares, trained, strict=True)]
        change = np.linalg.norm(sum_of_products([*terms, (-1.0, begun)]).values)
        best, cut = mean_product(begun, terms, [begun] * len(terms))
        apart = np.linalg.norm(sum_of_products([*terms, (-1.0, factors(mean))]).values)
        distances.append(float(apart / change))
        cuts.append(cut * float(np.linalg.norm(sum_of_products(terms).values) / change))
        if rule == "products":
            mean[name_b], mean[name_a] = (torch.from_numpy(value).float() for value in best)
    return mean, float(np.mean(distances)), float(np.mean(cuts))


def run(
    config: RunConfig, prepared: Prepared, clusters: list[Any], rule: str, local_steps: int, rounds: int
) -> dict[str, Any]:
    """Train under one rule; returns a row."""
    torch.manual_seed(config.seed)
    parts = prepared.build(config.seed)
    optimizer = replace(config.optimizer, total_steps=rounds * local_steps)
    orders = [DataOrder(len(data), config.batch_size, config.seed, n) for n, data in enumerate(clusters)]
    members = [Cluster(parts, data, optimizer, order) for data, order in zip(clusters, orders, strict=True)]
    weights = parts.weights()
    apart, cut = [], []
    for number in range(rounds):
        results = [member.train(weights, number * local_steps + 1, local_steps) for member in members]
        seen = np.array([count for _, count in results], dtype=np.float64)
        weights, distance, lost = joined(rule, weights, [trained for trained, _ in results], seen / seen.sum())
        apart.append(distance)
        cut.append(lost)
    parts.load(weights)
    score = prepared.evaluator.evaluate(parts, "validation")
    return {
        "rule": rule,
        "clusters": len(members),
        "local_steps": local_steps,
        "rounds": rounds,
        "rank": config.lora.rank,
        "seed": config.seed,
        "partition": config.data.partition,
        "factors_apart": round(float(np.mean(apart)), 4),
        "rank_cut": round(float(np.mean(cut)), 4),
        **{name: round(value, 4) for name, value in score.metrics.items()},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown: means over the seeds; the gain of the products is of pairs of one seed, with its error."""
    lines = [
        "| local steps | factors apart | lost at rank r | factors | products | gain [points] |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for steps in sorted({row["local_steps"] for row in rows}):
        scores = {
            rule: {r["seed"]: r for r in rows if (r["rule"], r["local_steps"]) == (rule, steps)} for rule in RULES
        }
        by_factors, by_products = (scores[rule] for rule in RULES)
        gains = [100 * (by_products[seed]["accuracy"] - by_factors[seed]["accuracy"]) for seed in by_factors]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        cells = [f"{fmean(row[name] for row in by_products.values()):.1%}" for name in ("factors_apart", "rank_cut")]
        for by_seed in (by_factors, by_products):
            values = [row["accuracy"] for row in by_seed.values()]
            cells.append(f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {steps} | {' | '.join(cells)} | {fmean(gains):+.1f} ± {error:.1f} |")
    return lines


def run_cases(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Run all cases of one seed."""
    chosen = task(config.task)
    prepared = chosen.prepare(config.data, config.model, config.seed, arguments.clusters)
    prepared = replace(prepared, spec=config.adapted(prepared.spec))
    shares = [
        chosen.cluster_data(config.data, prepared.tokenizer_json, n, arguments.clusters, config.seed)
        for n in range(arguments.clusters)
    ]
    for local_steps in map(int, arguments.local_steps.split(",")):
        rounds = max(arguments.samples // (arguments.clusters * config.batch_size * local_steps), 1)
        for rule in arguments.rules.split(","):
            print(json.dumps(run(config, prepared, shares, rule, local_steps, rounds)), flush=True)


def main() -> int:
    """Run every case, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="a TOML file, or a name in configs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--clusters", type=int, default=4)
    parser.add_argument("--local-steps", default="1,20,80")
    parser.add_argument("--samples", type=int, default=5120, help="of all clusters, under each rule")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--seeds", type=int, default=1, help="from 0 on")
    parser.add_argument("--table", type=Path, metavar="FILE", help="train nothing, print the table of these rows")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table([json.loads(line) for line in arguments.table.read_text().splitlines()])))
        return 0
    torch.set_num_threads(1)
    configured = load_config(arguments.config, arguments.sets)
    for seed in range(arguments.seeds):
        run_cases(replace(configured, seed=seed), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
