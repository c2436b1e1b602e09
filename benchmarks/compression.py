"""Savings and costs of compression: bytes, metric and virtual round latency of one task, run after run.

Every variant is a whole ``collapipe run`` of the same configuration with ``costs = "model"``, so that the planner plans
with the bytes that are sent. Reported of each: payload bytes of a cluster and round (the update, and the decoder's
stream both ways), the mean virtual latency of a round, and the metrics of the test set.

    python benchmarks/compression.py                                      # the default task, a few minutes
    python benchmarks/compression.py --config trec6 --set data.path=FOLDER --rounds 300
    python benchmarks/compression.py --set model.trainable=lora --variants none,int8
    python benchmarks/compression.py --config smollm2 --set data.path=FOLDER --set model.pretrained=MODEL --rounds 40 \
        --variants "none,int4 stream" --seeds 3 --rows rows.jsonl       # rows that are there are not trained again
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import as_settings, train

VARIANTS = {
    "none": {},
    "fp16": {"compression.update": "fp16"},
    "int8": {"compression.update": "int8"},
    "top-k": {"compression.update": "top-k"},
    "fp16 activations": {"compression.activations": "fp16"},
    "int8 activations": {"compression.activations": "int8"},
    "int8 both": {"compression.update": "int8", "compression.activations": "int8"},
    "int8 stream": {"compression.stream": "int8"},
    "int4 stream": {"compression.stream": "int4"},
    "int2 stream": {"compression.stream": "int2"},
    "int4 both": {"compression.update": "int4", "compression.stream": "int4"},
    "once": {"compression.cache-gb": 8},
    "once int8 stream": {"compression.cache-gb": 8, "compression.stream": "int8"},
    "labels stay": {"split.labels": "cluster"},
}
USUAL = ",".join(name for name in VARIANTS if not {"stream", "once", "stay", "int4"} & {*name.split()})
DEFAULT_SETS = ("data.num-examples=4000", "data.evaluation-examples=200", "local-steps=4", "scenario=two-clusters")


def run(variant: str, seed: int, config: str, sets: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Train one variant; returns its row."""
    run_dir = folder / f"{variant.replace(' ', '-')}-{seed}"
    own = {**VARIANTS[variant], "costs": "model", "num-rounds": rounds, "evaluate-every": 0, "checkpoint-every": 0}
    own["seed"] = seed
    train(config, [*sets, *as_settings(own)], run_dir)
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    metrics = json.loads((run_dir / "summary.json").read_text())["metrics"]
    clusters = [report["payload_bytes"] for line in lines for report in line["clusters"]]
    return {
        "variant": variant,
        "seed": seed,
        "rounds": rounds,
        "sets": _without_folders(sets),
        "update_bytes": statistics.fmean(c["update"] for c in clusters),
        "stream_up_bytes": statistics.fmean(c["up"] for c in clusters),
        "stream_down_bytes": statistics.fmean(c["down"] for c in clusters),
        "message_bytes_up": statistics.fmean(line["bytes_up"] for line in lines),
        "planned_uplink_bytes": statistics.fmean(
            c["uplink_bytes"] for line in lines for c in line["virtual"]["clusters"] if c["selected"]
        ),
        "latency_s": statistics.fmean(line["virtual"]["latency_s"] for line in lines),
        # The first round starts the clusters.
        "round_s": statistics.median(line["round_s"] for line in lines[1:] or lines),
        "train_loss": lines[-1]["train_loss"],
        "metrics": metrics,
        "receipt": {row["what"]: row["error"] for row in json.loads((run_dir / "receipt.json").read_text())},
    }


def _without_folders(sets: Sequence[str]) -> list[str]:
    """Return the settings that are the same on every machine."""
    return [setting for setting in sets if not setting.startswith(("data.path=", "model.pretrained="))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="", help="a TOML file, or a name in configs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--variants", default=USUAL, help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--rows", type=Path, help="file of rows, a line each: those that are there are not trained again"
    )
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    args.variants = [name.strip() for name in args.variants.split(",")]
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"--variants: expected some of {', '.join(VARIANTS)}, found {', '.join(unknown)}")
    return args


def main() -> int:
    args = arguments()
    say = sys.stderr if args.json else sys.stdout
    sets = [*(() if args.config else DEFAULT_SETS), *args.sets]
    rows: list[dict[str, Any]] = []
    if args.rows and args.rows.exists():
        rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    print(f"{'':<17} {'update kB':>10} {'up kB':>9} {'down kB':>9} {'latency s':>10} {'wall s':>7}", file=say)
    for row in rows:
        print(_line(row), file=say)
    known = {(row["variant"], row["seed"], row["rounds"], *row["sets"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="collapipe-compression-") as folder:
        for seed, variant in itertools.product(range(args.seeds), args.variants):
            if (variant, seed, args.rounds, *_without_folders(sets)) in known:
                continue
            row = run(variant, seed, args.config, sets, args.rounds, Path(folder))
            rows.append(row)
            print(_line(row), file=say, flush=True)
            if args.rows:
                with args.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(
        f"a cluster and round, {args.rounds} rounds; latency is virtual, metrics of the test set, wall s a median",
        file=say,
    )
    if args.json:
        print(json.dumps(rows))
    return 0


def _line(row: dict[str, Any]) -> str:
    sizes = (row["update_bytes"] / 1e3, row["stream_up_bytes"] / 1e3, row["stream_down_bytes"] / 1e3)
    metrics = "  ".join(f"{name} {value:.5g}" for name, value in row["metrics"].items())
    columns = " ".join(f"{size:>9.1f}" for size in sizes)
    return f"{row['variant']:<17} {row['seed']} {columns} {row['latency_s']:>10.2f} {row['round_s']:>7.2f}  {metrics}"


if __name__ == "__main__":
    sys.exit(main())
