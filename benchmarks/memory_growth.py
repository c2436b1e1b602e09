"""Does a device's memory grow over rounds? Sequences of many lengths, and what the C library makes of freed memory.

One device of TEBs with adapters over random weights trains round after round in a process of its own, without Ray, as
an actor does: freed memory is handed back when a round's weights come. A row has the memory that no file backs at the
beginning and at the end of a round, above that before the TEBs, beside what the tensors take at their peak [MB].

    python benchmarks/memory_growth.py --rounds 24 --base-dtype float32,int8 --freed kept,returned

Rows go to standard output, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

LONGEST = 96


def anonymous_mb() -> float:
    """Memory of this process that no file backs [MB]."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon:"))


def train(base_dtype: str, freed: str, rounds: int, width: int, blocks: int) -> list[dict[str, Any]]:
    """Train; returns a row for each round."""
    import torch
    from transformers import LlamaConfig

    from client_pipeline.families.families import build_block
    from client_pipeline.families.hugging_face import spec_from_config
    from client_pipeline.partition.dropout_seed import StepId
    from client_pipeline.partition.parts import frozen_parameters
    from client_pipeline.partition.spec import LoraConfig
    from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
    from client_pipeline.runtime.stage.memory import give_freed_memory_back, keep_freed_memory, return_freed_memory
    from client_pipeline.runtime.stage.moved_block import MovedBlock
    from client_pipeline.runtime.stage.stage import Stage
    from client_pipeline.weights.low_bits import compress, low_bit_layers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _ = keep_freed_memory() if freed == "kept" else return_freed_memory()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=blocks + 1,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=LONGEST,
    )
    spec = replace(spec_from_config(config, "causal-lm"), lora=LoraConfig(rank=8))
    build_block(spec, 0)
    give_freed_memory_back()
    before_mb = anonymous_mb()
    stage = Stage(spec, OptimizerConfig())
    for index in range(blocks):
        stage.place(index, MovedBlock(frozen=frozen_parameters(build_block(spec, index))))
        if base_dtype != "float32":
            block = stage.blocks[index].module
            matrices = {name: layer.weight.detach() for name, layer in linear_layers(block)}
            compress(block, base_dtype)
            for name, layer in low_bit_layers(block):
                layer.fill(matrices[name])
            stage.blocks[index].frozen.clear()
    weights = stage.weights()
    rows = []
    for number in range(1, rounds + 1):
        give_freed_memory_back()
        begin_mb = anonymous_mb() - before_mb
        stage.load({i: {name: value.clone() for name, value in of.items()} for i, of in weights.items()})
        for local in (1, 2):
            step = StepId(seed=0, round=number, step=local, cluster=0)
            length = int(torch.randint(16, LONGEST + 1, ()))
            # The longest is in the first round: what comes later needs no more.
            mask_BT = torch.ones(2, LONGEST if number == 1 else length, dtype=torch.bool)
            for i in range(4):
                y_BTD = stage.forward(step, i, torch.randn(*mask_BT.shape, width), mask_BT)
            for i in range(4):
                stage.backward(step, i, torch.ones_like(y_BTD), mask_BT)
            stage.apply(2 * number + local, 1.0)
        weights = stage.weights()
        row = {"base_dtype": base_dtype, "freed": freed, "width": width, "blocks": blocks, "round": number}
        sizes = {"begin_mb": begin_mb, "end_mb": anonymous_mb() - before_mb, "tensors_mb": stage.held_bytes() / 1e6}
        rows.append(row | {name: round(value, 1) for name, value in sizes.items()})
    return rows


def linear_layers(block: Any) -> list[tuple[str, Any]]:
    """Layers of a TEB whose matrices are frozen, by the names of those that adapters stand before."""
    import torch

    return [
        (name.replace(".base_layer", ""), layer)
        for name, layer in block.named_modules()
        if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad
    ]


def main() -> None:
    """Run each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--base-dtype", default="float32,int8")
    parser.add_argument("--freed", default="kept,returned", help="kept: the default; returned: under a limit")
    arguments = parser.parse_args()
    for base_dtype in arguments.base_dtype.split(","):
        for freed in arguments.freed.split(","):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                case = (base_dtype, freed, arguments.rounds, arguments.width, arguments.blocks)
                for row in pool.submit(train, *case).result():
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
