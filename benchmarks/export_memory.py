"""Memory of ``collapipe export``: the whole model, and the adapters alone, each in a process of its own.

The base has TinyLlama's sizes, 1.1 billion random weights in bfloat16; the run has adapters over it in int8, and a
head of one trained block. Private memory (USS) and the process's share (PSS) are peaks, sampled.

    python benchmarks/export_memory.py [--layers 22] [--interval 0.1] [--folder /tmp] [--json]

Needs 7 GB of disk below ``--folder``, and removes what it writes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from process_memory import watch
from transformers import LlamaConfig, LlamaForCausalLM

from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import write_config
from flower_app.saved_model import save_model

WIDTH = 2048


def save_base(folder: Path, layers: int) -> None:
    """Write a model of TinyLlama's sizes, in bfloat16."""
    sizes = {"vocab_size": 32000, "hidden_size": WIDTH, "intermediate_size": 5632, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=4)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")


def save_run(folder: Path, base: Path, layers: int) -> None:
    """Write a run as its training leaves it."""
    spec, weights = load_pretrained_weights(str(base), "causal-lm", server_layers=1)
    trained = {name: weights[name].clone() for name in weights if name.startswith("head.")}
    for block in range(layers - 1):
        for layer, width in (("q_proj", WIDTH), ("v_proj", 256)):
            name = f"blocks.{block}.layer.self_attn.{layer}"
            trained[f"{name}.lora_A.default.weight"] = 0.02 * torch.randn(8, WIDTH)
            trained[f"{name}.lora_B.default.weight"] = 0.02 * torch.randn(width, 8)
    folder.mkdir()
    write_config(folder, RunConfig.as_sent({"model.pretrained": str(base)}))
    save_model(folder, replace(spec, lora=LoraConfig(rank=8), base_dtype="int8"), trained, "", {}, 1, weights.base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between samples")
    parser.add_argument("--folder", type=Path, help="for the models")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="collapipe-export-", dir=arguments.folder) as name:
        folder = Path(name)
        save_base(folder / "base", arguments.layers)
        save_run(folder / "run", folder / "base", arguments.layers)
        for kind, options in (("merged", []), ("adapters", ["--adapter"])):
            command = [sys.executable, "-m", "flower_app.cli", "export", str(folder / "run"), str(folder / kind)]
            begun = time.monotonic()
            result = watch([*command, *options], arguments.interval)
            if result["returncode"]:
                sys.exit(result["returncode"])
            peaks = {key: max(process[key] for process in result["processes"]) / 1e6 for key in ("uss", "pss")}
            written = sum(file.stat().st_size for file in (folder / kind).iterdir()) / 1e6
            row = {"export": kind, **{f"{key}_mb": round(value) for key, value in peaks.items()}}
            row |= {"written_mb": round(written), "seconds": round(time.monotonic() - begun)}
            print(json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
