"""A split model on an accelerator: equal to the whole model on the host, its speed and memory beside one process.

Two stages and a head compute on one accelerator and meet on the host, as transports have it; neither Ray nor Flower
runs. First one step in float32 is compared with the whole model on the host, tensor by tensor. Then both train ten
steps of eight micro-batches on the accelerator, in turn, in mixed precision.

    python benchmarks/accelerator_steps.py --device cuda          a table
    python benchmarks/accelerator_steps.py --device cpu --shapes tiny --json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from client_pipeline.families.families import build_head, build_parts
from client_pipeline.families.hugging_face import spec_from_config
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.parts import (
    IGNORED_LABEL,
    Batch,
    ModelParts,
    block_weights,
    join_weights,
    own_parameters,
    target_weight,
    targets,
)
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from client_pipeline.runtime.stage.accelerator import find_accelerator
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer, gradients
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.runtime.stage.whole import whole_step

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "heads": 4, "kv": 2, "vocab": 128},
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "heads": 9,
        "kv": 3,
        "vocab": 49152,
    },
    "llama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "heads": 32,
        "kv": 4,
        "vocab": 32000,
    },
}
SMALLEST_SCALE = 1e-5
"""Share of the largest gradient at which smaller ones are compared, as in ``collapipe verify``, which imports Ray."""
SGD = OptimizerConfig(name="sgd", lr=1e-3)
ADAMW = OptimizerConfig(name="adamw", lr=1e-4)


def spec_of(shape: str) -> ModelSpec:
    from transformers import LlamaConfig

    sizes = dict(SHAPES[shape])
    heads, kv, vocabulary = sizes.pop("heads"), sizes.pop("kv"), sizes.pop("vocab")
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=shape == "smollm2-135m",
    )
    return spec_from_config(config, CAUSAL_LM)


def random_batch(spec: ModelSpec, batch_size: int, length: int) -> Batch:
    """Draw ids, right padding of unequal length, and the ids as labels."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(3, int(spec.config["vocab_size"]), (batch_size, length), generator=generator)
    lengths_B1 = torch.randint(length // 2, length + 1, (batch_size, 1), generator=generator)
    mask_BT = torch.arange(length) < lengths_B1
    labels_BT = ids_BT.masked_fill(~mask_BT, IGNORED_LABEL)
    labels_BT[:, 0] = IGNORED_LABEL
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}


class SplitModel:
    """Embedding on the host, two stages and the head on one accelerator."""

    def __init__(
        self, spec: ModelSpec, parts: ModelParts, device: torch.device, optimizer: OptimizerConfig, precision: str
    ) -> None:
        count = len(parts.blocks)
        self.embedding = parts.embedding.train()
        self.optimizer = PartOptimizer(own_parameters(self.embedding), optimizer)
        self.tied = parts.tied
        weights = parts.weights(head=False)
        self.stages = [Stage(spec, optimizer, precision=precision, accelerator=device) for _ in range(2)]
        for index in range(count):
            self.stages[index * 2 // count].place(index, MovedBlock(block_weights(weights, index)))
        # A server builds its head by itself: of a tied matrix it has a place of its own.
        head = build_head(spec)
        head.load_state_dict(parts.head.state_dict())
        self.head = HeadTrainer(head, optimizer, unit=count, precision=precision, accelerator=device)

    def pass_gradients(self, step: StepId, batch: Batch, num_micro_batches: int) -> tuple[torch.Tensor, float]:
        """Run a step's micro-batches forward and backward; return output [B, T, D] and summed loss."""
        weight, outputs, loss_sum = target_weight(targets(batch)), [], 0.0
        tied = {own: self.embedding.get_parameter(name).detach() for own, name in self.tied.items()}
        for number, piece in enumerate(split_batch(batch, num_micro_batches)):
            mask_BT, embedded_BTD = piece["attention_mask"], self.embedding(piece)
            x_BTD = embedded_BTD.detach()
            for stage in self.stages:
                x_BTD = stage.forward(step, number, x_BTD, mask_BT)
            outputs.append(x_BTD)
            gradient_BTD, loss = self.head.gradient(step, number, x_BTD, mask_BT, targets(piece), weight, tied)
            loss_sum += loss
            for stage in reversed(self.stages):
                gradient_BTD = stage.backward(step, number, gradient_BTD, mask_BT)
            embedded_BTD.backward(gradient_BTD)
        for own, gradient in self.head.tied_gradient(step.cluster).items():
            self.embedding.get_parameter(self.tied[own]).grad += gradient
        return torch.cat(outputs), loss_sum

    def gradients(self, cluster: int) -> dict[str, torch.Tensor]:
        """Return the waiting gradients by global parameter name."""
        of_blocks = {index: block for stage in self.stages for index, block in stage.gradients().items()}
        return join_weights(gradients(own_parameters(self.embedding)), of_blocks, self.head.gradients(cluster))

    def train(self, step: StepId, batch: Batch, num_micro_batches: int) -> float:
        """Take one optimizer step; return the summed loss."""
        _, loss_sum = self.pass_gradients(step, batch, num_micro_batches)
        self.head.apply([Contribution(cluster=step.cluster, weight=1.0)], step.step)
        for stage in self.stages:
            stage.apply(step.step, 1.0)
        self.optimizer.apply(step.step, 1.0)
        return loss_sum


def largest_differences(spec: ModelSpec, device: torch.device, length: int) -> dict[str, float]:
    """Compare one float32 step on the device with the whole model's on the host, max|a - b| / max|b|."""
    step, batch = StepId(seed=0, round=1, step=1, cluster=0), random_batch(spec, 4, length)
    whole = whole_step(build_parts(spec, seed=1), step, batch, 2)
    split = SplitModel(spec, build_parts(spec, seed=1), device, SGD, "float32")
    output_BTD, loss_sum = split.pass_gradients(step, batch, 2)
    split_gradients = split.gradients(0)
    smallest = SMALLEST_SCALE * max(float(g.abs().max()) for g in whole.gradients.values())
    return {
        "output": float((output_BTD - whole.output_BTD).abs().max() / whole.output_BTD.abs().max()),
        "loss": abs(loss_sum - whole.loss_sum) / abs(whole.loss_sum),
        "gradients": max(
            float((split_gradients[name] - g).abs().max() / g.abs().max().clamp_min(smallest))
            for name, g in whole.gradients.items()
        ),
    }


def timed(train: Callable[[int], float], steps: int, device: torch.device) -> dict[str, float]:
    """Return median seconds of a step after two that warm up, the device's peak memory, and the last loss."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = [], 0.0
    for number in range(1, steps + 3):
        begin = time.perf_counter()
        loss = train(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"step_s": statistics.median(seconds[2:]), "peak_gb": peak / 1e9, "loss": loss}


def _speed_of_split(
    spec: ModelSpec, device: torch.device, batch: Batch, steps: int, precision: str
) -> dict[str, float]:
    split = SplitModel(spec, build_parts(spec, seed=1), device, ADAMW, precision)
    return timed(lambda n: split.train(StepId(seed=0, round=1, step=n, cluster=0), batch, 8), steps, device)


def speeds(spec: ModelSpec, device: torch.device, batch_size: int, length: int, steps: int, precision: str) -> Any:
    """Train the split and the whole model on the device, one after the other."""
    batch, results = random_batch(spec, batch_size, length), {}
    results["split"] = _speed_of_split(spec, device, batch, steps, precision)
    parts = build_parts(spec, seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.train().to(device)
    there = {name: tensor.to(device) for name, tensor in batch.items()}
    optimizer = PartOptimizer(dict(parts.named_parameters()), ADAMW)

    def train_whole(number: int) -> float:
        outcome = whole_step(parts, StepId(seed=0, round=1, step=number, cluster=0), there, 8, precision)
        optimizer.apply(number, 1.0)
        return outcome.loss_sum

    results["whole"] = timed(train_whole, steps, device)
    tokens = int(batch["attention_mask"].sum())
    for result in results.values():
        result["tokens_per_s"] = tokens / result["step_s"]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda", "mps"))
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "llama-1.1b"], choices=tuple(SHAPES))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    try:
        device = find_accelerator(args.device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    rows = []
    for shape in args.shapes:
        spec = spec_of(shape)
        row = {"shape": shape, "device": card, "torch": torch.__version__, "precision": args.precision}
        row |= {"differences": largest_differences(spec, device, min(args.length, 64))}
        row |= speeds(spec, device, args.batch_size, args.length, args.steps, args.precision)
        rows.append(row)
        if not args.json:
            print(f"{shape} on {card}: largest differences {row['differences']}")
            for kind in ("split", "whole"):
                figures = row[kind]
                print(f"  {kind}: {figures['tokens_per_s']:.0f} tokens/s, peak {figures['peak_gb']:.2f} GB", flush=True)
    if args.json:
        print(json.dumps(rows))
    return 0 if all(value < 1e-3 for row in rows for value in row["differences"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
