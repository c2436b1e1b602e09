"""Memory of a device: a 12-layer BERT whole on one device, and cut into segments.

Every plan trains for real: a control unit and its Ray actors. Measured is the peak of the largest device process while
a round is trained, above what the same process had before it held anything; modelled is gamma_0 per TEB, as
``costs = "model"`` counts it: weights, gradients, optimizer state, and the activations of a batch.

    python benchmarks/memory.py [--width 768] [--batch-size 8] [--length 64] [--steps 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any

from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray

# Ray reads its settings when it is imported.
prepare_private_ray()

import ray
import torch
from transformers import BertConfig

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import spec_from_config
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.actors import start_control_unit, train_round
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.system.costs import model_costs

PLANS = [((12,), 1), ((12,), 8), ((6, 6), 8), ((4, 4, 4), 8), ((5, 4, 3), 8), ((3, 3, 3, 3), 8)]
"""TEBs of each device, and m."""


class RandomSentences:
    """Token sequences of one length, with labels of two classes."""

    def __init__(self, num_examples: int, length: int) -> None:
        self.tokens = torch.randint(4, 100, (num_examples, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def collate(self, indices: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
        rows = self.tokens[indices]
        return {"input_ids": rows, "attention_mask": torch.ones_like(rows, dtype=torch.bool), "labels": rows[:, 0] % 2}


def measure(width: int, batch_size: int, length: int, steps: int) -> list[dict[str, Any]]:
    """Train a round under each plan, each in processes of its own."""
    config = BertConfig(
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=12,
        num_attention_heads=width // 64 or 1,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    spec = spec_from_config(config, "sequence-classification")
    block = model_costs(spec, sequence_length=length, batch_size=batch_size).block_memory
    weights = build_parts(spec, seed=0).weights()
    rows = []
    for number, (parts, m) in enumerate(PLANS):
        plan = ClusterPlan(delta=parts, order=tuple(range(len(parts))), m=m)
        setup = ClusterSetup(
            run=f"memory-{os.getpid()}-{number}",
            cluster=0,
            spec=spec,
            optimizer=OptimizerConfig(lr=1e-4),
            runtime=RuntimeConfig(timeout=600.0),
            seed=0,
            batch_size=batch_size,
            local_steps=steps,
            load_data=partial(RandomSentences, 4 * batch_size, length),
        )
        start_control_unit(setup)
        done = train_round(setup.run, 0, RoundOrder(round=1, weights=weights, plan=plan), 600.0)
        above = [d["peak_bytes"] - d["idle_bytes"] for d in done.report["devices"].values()]
        rows.append(
            {
                "delta": list(parts),
                "m": m,
                "measured_bytes": max(above),
                "modelled_bytes": max(parts) * block,
                "sum_measured_bytes": sum(above),
            }
        )
        for device in range(len(parts)):
            ray.kill(ray.get_actor(f"{setup.actor_name}/device-{device}", namespace="collapipe"))
        ray.kill(ray.get_actor(setup.actor_name, namespace="collapipe"))
    whole = [row for row in rows if len(row["delta"]) == 1]
    for row in rows:
        for kind in ("measured", "modelled"):
            row[f"{kind}_share"] = row[f"{kind}_bytes"] / max(w[f"{kind}_bytes"] for w in whole)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with private_ray(num_cpus=2, namespace="collapipe"):
        rows = measure(arguments.width, arguments.batch_size, arguments.length, arguments.steps)
    if arguments.json:
        print(json.dumps({"plans": rows}))
        return
    print("TEBs          m   measured MB  of whole   modelled MB  of whole")
    for row in rows:
        print(
            f"{'-'.join(map(str, row['delta'])):<12} {row['m']:>2}   {row['measured_bytes'] / 1e6:>11.0f}  "
            f"{row['measured_share']:>8.0%}   {row['modelled_bytes'] / 1e6:>11.0f}  {row['modelled_share']:>8.0%}"
        )


if __name__ == "__main__":
    main()
