"""What does each part of a language model cost its process? A server, a control unit and devices, one after the other.

Each is a fork of one process that has imported what a run imports, and does what its role does in a run with adapters
over a pretrained folder: it builds its part, takes training steps on random text, and the server evaluates, too.
Printed is private memory (USS) beyond the imports, whose pages the forks share: at the start, with the part, and at
the end.
Mapped pages that no other process maps are private, too: beside a neighbour a process has less.

    python benchmarks/part_memory.py --model FOLDER [--segments 10,10,9] [--base-dtype float32,int8] [--roles server]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import psutil

PROGRAMS = (
    "client_pipeline.runtime.control_unit",
    "client_pipeline.runtime.device",
    "flower_app.training.training_run",
    "transformers.models.llama.modeling_llama",
    "peft",
)
"""What the processes of a run import."""


def private_mb() -> float:
    """Private memory of this process [MB]."""
    return float(psutil.Process().memory_full_info().uss) / 1e6


def play(role: str, base_dtype: str, arguments: argparse.Namespace) -> tuple[float, float, float, float]:
    """Be one role; returns the bytes of its part, and its memory at the start, with the part and at the end [MB]."""
    import torch

    from client_pipeline.partition.families import build_embedding, build_over, head_of, read_library_config
    from client_pipeline.partition.micro_batches import StepId
    from client_pipeline.partition.parts import part_weights, target_weight, targets
    from client_pipeline.partition.pretrained import load_pretrained_weights
    from client_pipeline.partition.spec import LoraConfig
    from client_pipeline.runtime.decoder_update import HeadTrainer
    from client_pipeline.runtime.memory import give_freed_memory_back, keep_freed_memory
    from client_pipeline.runtime.optimizer_config import OptimizerConfig
    from client_pipeline.runtime.stage import MovedBlock, Stage
    from client_pipeline.runtime.verification import random_batch

    torch.set_num_threads(1)
    keep_freed_memory()
    start = private_mb()
    adamw = OptimizerConfig(name="adamw")
    head = head_of(read_library_config(arguments.model))
    spec, weights = load_pretrained_weights(arguments.model, head, server_layers=arguments.server_layers)
    spec = replace(spec, lora=LoraConfig(rank=arguments.rank), base_dtype=base_dtype)
    base = weights.base
    assert base is not None
    batch = random_batch(spec, arguments.batch_size, arguments.length)
    x_BTD = torch.randn(arguments.batch_size, arguments.length, int(spec.config["hidden_size"]))
    mask_BT, step = batch["attention_mask"], StepId(seed=0, round=1, step=1, cluster=0)
    if role == "server":
        parts = build_over(spec, base, part_weights(weights, "head"), seed=0)
        trainer = HeadTrainer(parts.head, adamw, unit=len(parts.blocks))
        part_bytes = sum(p.nbytes for p in parts.head.parameters())
        built = private_mb()
        for number in range(arguments.steps):
            hidden = x_BTD.clone().requires_grad_()
            (parts.head(hidden, mask_BT, targets(batch)) / target_weight(targets(batch))).backward()
            trainer.optimizer.apply(number + 1)
        with torch.no_grad():
            for states_BTD in parts.encode_each([batch] * 2):
                parts.head(states_BTD, mask_BT, targets(batch))
    elif role == "control unit":
        embedding = build_embedding(spec, base.part("embedding."))
        part_bytes = sum(p.nbytes for p in embedding.parameters())
        built = private_mb()
        embedding(batch)
    else:
        sizes = [int(size) for size in arguments.segments.split(",")]
        device = int(role.split()[1])
        stage = Stage(spec, adamw)
        for index in range(sum(sizes[:device]), sum(sizes[: device + 1])):
            stage.place(index, MovedBlock(frozen=base.part(f"blocks.{index}.")))
        # As a device does when a round's weights come.
        give_freed_memory_back()
        part_bytes = stage.held_bytes()
        built = private_mb()
        for number in range(arguments.steps):
            pieces = zip(x_BTD.split(arguments.micro_batch), mask_BT.split(arguments.micro_batch), strict=True)
            for micro_batch, (piece, mask) in enumerate(pieces):
                y_BTD = stage.forward(step, micro_batch, piece.clone(), mask)
                stage.backward(step, micro_batch, torch.ones_like(y_BTD), mask)
            stage.apply(number + 1, 1.0)
    return part_bytes / 1e6, start, built, private_mb()


def main() -> None:
    """Measure every role, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal language model")
    parser.add_argument("--segments", default="10,10,9", help="TEBs of each device")
    parser.add_argument("--server-layers", type=int, default=1)
    parser.add_argument("--base-dtype", default="float32", help="one or several, with commas")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--roles", default="", help="such as 'server,device 0'; empty: all")
    arguments = parser.parse_args()
    for module in PROGRAMS:
        importlib.import_module(module)
    # Else the collector writes to all objects of the imports, and has each fork copy their pages.
    gc.collect()
    gc.freeze()
    print(f"imports {private_mb():.0f} MB", flush=True)
    context = multiprocessing.get_context("fork")
    roles = ["server", "control unit", *(f"device {i}" for i in range(len(arguments.segments.split(","))))]
    for base_dtype in arguments.base_dtype.split(","):
        for role in arguments.roles.split(",") if arguments.roles else roles:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                part, start, built, end = pool.submit(play, role, base_dtype, arguments).result()
            print(
                f"{base_dtype:8} {role:13} part {part:6.1f} MB  start {start:4.0f} MB  built {built:4.0f} MB  "
                f"end {end:4.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
