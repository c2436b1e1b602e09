"""The run's model trained in one process on all the data: the baseline that federated training is held to.

It takes the same configuration as ``collapipe run``, and no more of Flower, Ray or the pipeline than that.

    python benchmarks/central.py --config multi30k-tiny --set data.path=FOLDER --batch-size 128 \
        --samples 258000 --evaluate-at 87000,174000,258000

``gradient-accumulation``, ``runtime.precision`` and ``runtime.recompute`` count as in a run: a step has so many joint
batches.

``--shares N`` takes the batches of N clusters, each of its own share of the data, as one joint batch: what a run with N
clusters computes with SGD, one local step a round and ``decoder-sync = "step"``.

``--save FOLDER`` keeps the trained model; ``--set model.from=FOLDER`` starts another training from it.

Such a model reached greedy BLEU 10.8 / 26.9 / 30.0 on Multi30K tok after 87k / 174k / 258k samples when first measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from client_pipeline.partition.parts import Batch, ModelParts, target_weight, targets
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.control_unit.round_order import TrainingData
from client_pipeline.runtime.stage.accelerator import autocast
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.memory import is_out_of_memory, limit_private_memory
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale
from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.saved_model import save_model
from flower_app.tasks.base import Prepared, Task, task

_held = ExitStack()
"""Frozen weights of a moved model, until this process ends."""


class CentralTraining:
    """One model, one optimizer, one process; of several shares of data each gives a batch to every joint one."""

    def __init__(
        self,
        parts: ModelParts,
        data: Sequence[TrainingData],
        optimizer: OptimizerConfig,
        batch_size: int,
        seed: int,
        *,
        gradient_accumulation: int = 1,
        precision: str = "float32",
        recompute: bool = False,
    ) -> None:
        self.parts = parts
        self.data = data
        self.gradient_accumulation = gradient_accumulation
        self.precision = precision
        self.recompute = recompute
        self.optimizer = PartOptimizer(dict(parts.named_parameters()), optimizer)
        self.orders = [DataOrder(len(share), batch_size, seed, cluster=i) for i, share in enumerate(data)]
        self.device = next(parts.head.parameters()).device
        self.step = 0
        torch.manual_seed(seed)

    def train_step(self) -> float:
        """Take one step, return the mean loss per target (label smoothing and class weights included)."""
        first = self.step * self.gradient_accumulation + 1
        batches = [
            share.collate(order.next_batch(), seed=first + i)
            for i in range(self.gradient_accumulation)
            for share, order in zip(self.data, self.orders, strict=True)
        ]
        weight = sum(target_weight(targets(batch)) for batch in batches)
        mean = 0.0
        for batch in batches:
            loss = self._loss_sum({name: tensor.to(self.device) for name, tensor in batch.items()}) / weight
            loss.backward()
            mean += float(loss.detach())
        self.step += 1
        clip = self.optimizer.config.clip_norm
        self.optimizer.apply(self.step, clip_scale(clip, self.optimizer.gradient_norm_sq()) if clip else 1.0)
        return mean

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        """Compute the loss as the pipeline does: what goes from part to part is float32 at any precision."""
        mask_BT = batch["attention_mask"]
        with autocast(self.precision, self.device):
            x_BTD = self.parts.embedding(batch).float()
            mask = self.parts.mask_form(mask_BT, x_BTD.dtype)
            for block in self.parts.blocks:
                kept = checkpoint(block, x_BTD, mask, use_reentrant=False) if self.recompute else block(x_BTD, mask)
                x_BTD = kept.float()
            loss: torch.Tensor = self.parts.head(x_BTD, mask_BT, targets(batch))
        return loss


def move(parts: ModelParts, device: str) -> None:
    """Bring a model to ``cuda``; TEBs that had their frozen weights while they ran alone keep them from then on."""
    if device == "cpu":
        return
    for on_demand in parts.on_demand:
        _held.enter_context(on_demand.held())
    for module in (parts.embedding, parts.blocks, parts.head):
        module.to(device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="a TOML file, or a name in configs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--samples", type=int, default=60_000, help="training examples seen in all")
    parser.add_argument("--evaluate-at", default="", help="sample counts, with commas; the end is always scored")
    parser.add_argument("--batch-size", type=int, default=0, help="the joint batch (default: N x batch-size)")
    parser.add_argument("--shares", type=int, default=1, help="of the data, whose batches make the joint one")
    parser.add_argument("--save", metavar="FOLDER", help="where to keep the model, as a run does")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--memory-gb", type=float, default=0.0, help="private memory beside the imports, as of a device; 0: any"
    )
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    try:
        config = load_config(args.config, args.sets)
        batch_size = args.batch_size or config.batch_size * (
            config.num_clusters or load_scenario(config.scenario).num_clusters
        )
        if args.shares < 1 or batch_size % args.shares:
            raise ValueError(f"--shares: expected a divisor of the joint batch of {batch_size}, found {args.shares}")
        samples = batch_size * config.gradient_accumulation
        steps = -(-args.samples // samples)
        optimizer = replace(config.optimizer, total_steps=steps)
        chosen = task(config.task)
        prepared = chosen.prepare(config.data, config.model, config.seed, num_clusters=args.shares)
        prepared = replace(prepared, spec=config.adapted(prepared.spec))
        data = [
            chosen.cluster_data(config.data, prepared.tokenizer_json, share, args.shares, config.seed)
            for share in range(args.shares)
        ]
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.memory_gb and not limit_private_memory(args.memory_gb * 1e9):
        print("error: --memory-gb: this system keeps no such limit", file=sys.stderr)
        return 2
    try:
        return train(args, config, prepared, chosen, data, optimizer, batch_size)
    except (RuntimeError, MemoryError) as error:
        if not args.memory_gb or not is_out_of_memory(error):
            raise
        print(
            f"error: the whole model in one process needs more than {args.memory_gb:g} GB: {str(error)[:200]}",
            file=sys.stderr,
        )
        return 3


def train(
    args: argparse.Namespace,
    config: RunConfig,
    prepared: Prepared,
    chosen: Task,
    data: Sequence[TrainingData],
    optimizer: OptimizerConfig,
    batch_size: int,
) -> int:
    """Build the model, train it, and print and keep what is asked for."""
    samples = batch_size * config.gradient_accumulation
    steps = optimizer.total_steps
    marks = {-(-int(mark) // samples) for mark in args.evaluate_at.split(",") if mark} | {steps}
    parts = prepared.build(config.seed)
    move(parts, args.device)
    training = CentralTraining(
        parts,
        data,
        optimizer,
        batch_size // len(data),
        config.seed,
        gradient_accumulation=config.gradient_accumulation,
        precision=config.runtime.precision,
        recompute=config.recomputes,
    )
    size = sum(p.numel() for _, p in parts.named_parameters())
    say = sys.stderr if args.json else sys.stdout
    print(
        f"{sum(map(len, data))} examples ({sum(share.truncated for share in data)} sequences cut), "
        f"vocabulary {prepared.spec.config['vocab_size']}, "
        f"{size:,} parameters, {steps} steps of {samples} examples on {args.device}, {config.runtime.precision}",
        file=say,
    )
    rows: list[dict[str, Any]] = []
    losses, train_s = [], 0.0
    while training.step < steps:
        started = time.perf_counter()
        losses.append(training.train_step())
        train_s += time.perf_counter() - started
        if training.step in marks:
            started = time.perf_counter()
            score = prepared.evaluator.evaluate(parts, args.split)
            evaluate_s = time.perf_counter() - started
            row = {
                "samples": training.step * samples,
                "steps": training.step,
                "train_loss": sum(losses) / len(losses),
                "losses": losses,
                **score.metrics,
                "train_s": train_s,
                "evaluate_s": evaluate_s,
                "signature": score.signature,
            }
            if not rows:
                names = "".join(f" {name:>9}" for name in score.metrics)
                print(f"{'samples':>8} {'steps':>6} {'train loss':>10}{names} {'seconds':>8}", file=say)
            rows.append(row)
            losses = []
            numbers = "".join(f" {value:>9.4g}" for value in score.metrics.values())
            print(
                f"{row['samples']:>8} {row['steps']:>6} {row['train_loss']:>10.3f}{numbers} {train_s:>8.1f}",
                file=say,
                flush=True,
            )
    print(f"training time without evaluation; metrics of {args.split}: {rows[-1]['signature']}", file=say)
    if args.save:
        folder = Path(args.save)
        folder.mkdir(parents=True, exist_ok=True)
        # Adapters cannot be read without what they are added to: it is named where it is in files, and kept elsewhere.
        frozen = {} if parts.base else parts.frozen_weights()
        weights = {name: value.cpu() for name, value in (parts.weights() | frozen).items()}
        remembered = chosen.saved(config.data)
        save_model(folder, prepared.spec, weights, prepared.tokenizer_json, remembered, base=parts.base)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
