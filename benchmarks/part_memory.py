"""Memory of each part of a language model: a server, a control unit and devices, one after the other.

Each is a fork of one process that has imported what a run imports, and does what its role does in a run with adapters
over a pretrained folder: it builds its part, takes training steps on random text, and the server evaluates, too.
Printed is private memory (USS) beyond the imports, whose pages the forks share: at the start, with the part, and at
the end.
Mapped pages that no other process maps are private, too: beside a neighbour a process has less.

Of a device the peak while it trains stands beside the one that is planned, by the schedule that it follows:
:class:`client_pipeline.system.device_memory.TebMemory`. Measured is memory that no file backs, looked at every
millisecond, above what the process has after one step of a device of one TEB, without that TEB: the libraries' own
buffers; and the weights that are mapped.

    python benchmarks/part_memory.py --model FOLDER [--segments 10,10,9] [--base-dtype float32,int8] [--roles server]

``--model random`` makes a LLaMA of SmolLM2's width, 13 layers and random weights; ``--json`` prints a line a row.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = (
    "client_pipeline.runtime.control_unit.control_unit",
    "client_pipeline.runtime.devices.device",
    "flower_app.training.training_run",
    "transformers.models.llama.modeling_llama",
    "peft",
)
"""Imports of a run's processes."""


SHAPE = ("freed", "segments", "schedule", "batch_size", "micro_batch", "length", "rank")
"""Arguments that a row repeats."""


def private_mb() -> float:
    """Private memory of this process [MB]."""
    return float(psutil.Process().memory_full_info().uss) / 1e6


def anonymous_mb() -> float:
    """Memory of this process that no file backs [MB]."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon:"))


class Watch:
    """Looks at :func:`anonymous_mb` every millisecond, in a thread: torch computes without Python's lock."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.peak_mb = max(self.peak_mb, anonymous_mb())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def make_random_model(folder: str) -> str:
    """Save a LLaMA of random weights; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=13,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def play(role: str, base_dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Be one role; returns its part, and its memory at the start, with the part and at the end [MB]."""
    import torch

    from client_pipeline.families.families import build_embedding, build_over, head_of, read_library_config
    from client_pipeline.families.pretrained import load_pretrained_weights
    from client_pipeline.partition.dropout_seed import StepId
    from client_pipeline.partition.parts import part_weights, target_weight, targets
    from client_pipeline.partition.spec import LoraConfig
    from client_pipeline.runtime.control_unit.verification import random_batch
    from client_pipeline.runtime.stage.decoder_update import HeadTrainer
    from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
    from client_pipeline.runtime.stage.memory import (
        give_freed_memory_back,
        keep_freed_memory,
        return_freed_memory,
    )
    from client_pipeline.runtime.stage.moved_block import MovedBlock
    from client_pipeline.runtime.stage.stage import Stage
    from client_pipeline.system.costs import model_costs
    from client_pipeline.timetable.schedules import actions, held_at_backward

    torch.set_num_threads(1)
    _ = keep_freed_memory() if arguments.freed == "kept" else return_freed_memory()
    start, peaks = private_mb(), {}
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
        sizes_of_batch = [len(piece) for piece in x_BTD.split(arguments.micro_batch)]
        costs = model_costs(spec, sequence_length=arguments.length, batch_size=arguments.batch_size)
        assert costs.memory is not None
        schedule = (arguments.schedule, device, len(sizes))
        moments = held_at_backward(*schedule, len(sizes_of_batch))
        peaks["planned_mb"] = costs.memory.stage_peak(sizes[device], moments, sizes_of_batch) / 1e6
        pieces, masks = x_BTD.split(arguments.micro_batch), mask_BT.split(arguments.micro_batch)

        def train(stage: Stage) -> None:
            for number in range(arguments.steps):
                # As all receives are posted at once.
                gradients = [torch.ones_like(piece) for piece in pieces]
                for kind, i in actions(*schedule, len(pieces)):
                    if kind == "F":
                        stage.forward(step, i, pieces[i].clone(), masks[i])
                    else:
                        stage.backward(step, i, gradients[i], masks[i])
                del gradients
                stage.apply(number + 1, 1.0)

        warm = Stage(spec, adamw)
        warm.place(0, MovedBlock(frozen=base.part("blocks.0.")))
        train(warm)
        del warm
        gc.collect()
        give_freed_memory_back()
        idle_mb = anonymous_mb()
        stage = Stage(spec, adamw)
        for index in range(sum(sizes[:device]), sum(sizes[: device + 1])):
            stage.place(index, MovedBlock(frozen=base.part(f"blocks.{index}.")))
        # As a device does when a round's weights come.
        give_freed_memory_back()
        part_bytes = stage.held_bytes()
        built = private_mb()
        with Watch() as watch:
            train(stage)
        mapped = sum(p.nbytes for block in stage.blocks.values() for p in block.frozen.values())
        peaks["peak_mb"] = watch.peak_mb - idle_mb + (mapped / 1e6 if base_dtype == "float32" else 0.0)
    return {"part_mb": part_bytes / 1e6, "start_mb": start, "built_mb": built, "end_mb": private_mb()} | peaks


def main() -> None:
    """Measure every role, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal language model, or random")
    parser.add_argument("--segments", default="10,10,9", help="TEBs of each device")
    parser.add_argument("--server-layers", type=int, default=1)
    parser.add_argument("--base-dtype", default="float32", help="one or several, with commas")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedule", default="gpipe", help="gpipe or 1f1b")
    parser.add_argument("--roles", default="", help="such as 'server,device 0'; empty: all")
    parser.add_argument("--freed", default="kept", help="kept, or returned as under runtime.memory-limit")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "random":
            arguments.model = make_random_model(folder)
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Play every role in a process of its own."""
    for module in PROGRAMS:
        importlib.import_module(module)
    # Else the collector writes to all objects of the imports, and has each fork copy their pages.
    gc.collect()
    gc.freeze()
    if not arguments.json:
        print(f"imports {private_mb():.0f} MB", flush=True)
    context = multiprocessing.get_context("fork")
    roles = ["server", "control unit", *(f"device {i}" for i in range(len(arguments.segments.split(","))))]
    for base_dtype in arguments.base_dtype.split(","):
        for role in arguments.roles.split(",") if arguments.roles else roles:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                row = pool.submit(play, role, base_dtype, arguments).result()
            if arguments.json:
                shape = {key: getattr(arguments, key) for key in SHAPE}
                rounded = {name: round(value, 1) for name, value in row.items()}
                print(json.dumps({"base_dtype": base_dtype, "role": role, **shape, **rounded}), flush=True)
                continue
            print(
                f"{base_dtype:8} {role:13} part {row['part_mb']:6.1f} MB  start {row['start_mb']:4.0f} MB  "
                f"built {row['built_mb']:4.0f} MB  end {row['end_mb']:4.0f} MB"
                + (f"  peak {row['peak_mb']:4.0f} MB, planned {row['planned_mb']:4.0f} MB" if "peak_mb" in row else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
