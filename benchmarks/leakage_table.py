"""What the server can read of three tasks, by where the labels are and with noise: train each way, then attack.

Every variant is a whole ``collapipe run`` of a small task, and then ``collapipe leakage`` on that run: held-out text is
read behind all TEBs, where the server does, and the update of one step is attacked. Variants are ways to split
(``split.labels = "server"`` or ``"cluster"``, and whole-model training, ``FedAvg``) and levels of noise on what a split
sends; whole models send updates alone, and have none. A line of ``--out`` is one run; the table has means over seeds.

    python benchmarks/leakage_table.py                                     # 15 runs, on generated text
    python benchmarks/leakage_table.py --task translation
    python benchmarks/leakage_table.py --task captions --set data.path=FOLDER --set model.pretrained=MODEL
    python benchmarks/leakage_table.py --seeds 1 --noise 0,1 --rounds 4 --json

FOLDER and MODEL are those of configs/boards/captions.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commands import as_settings, collapipe, train


class Task(NamedTuple):
    """A task of the table."""

    sets: Mapping[str, Any]
    score: str
    """Metric of the test set."""
    clip: float
    """Largest norm of an activation where there is noise: near the median's."""
    noise: tuple[float, ...] = (0.0, 0.3, 1.0)
    """Multipliers. The noise of an activation of width D is sqrt(D) times as long as they say, in clips: 2.4 and 8 of a
    small model's."""
    gradient_clip: float = 0.0
    """The same as ``clip`` of a gradient where the control unit has the labels; 0: the server is sent none."""
    config: str = ""


TASKS = {
    # A small BERT: what it sends has passed a LayerNorm, so that every token has a norm near the root of the width.
    "classes": Task(
        {
            "task.name": "sequence-classification",
            "model.family": "bert",
            "model.encoder-layers": 2,
            "data.num-examples": 8000,
            "scenario": "edge-boxes",
            "num-rounds": 15,
            "batch-size": 64,
            "local-steps": 8,
            "optimizer.lr": 0.003,
        },
        score="accuracy",
        clip=8.0,
    ),
    "translation": Task(
        {
            "data.num-examples": 4000,
            "data.evaluation-examples": 200,
            "scenario": "two-clusters",
            "num-rounds": 30,
            "local-steps": 4,
        },
        score="chrf",
        clip=23.0,
    ),
    "captions": Task(
        {
            "scenario": "two-clusters-adapters",
            "num-rounds": 4,
            "local-steps": 5,
            "batch-size": 8,
            "data.max-length": 32,
            "data.test-source": "test-300.en",
            "lora.rank": 8,
            "lora.alpha": 16,
            "optimizer.lr": 1e-3,
            # Noise needs that no norm is clipped.
            "optimizer.clip-norm": 0,
        },
        score="loss",
        clip=780.0,
        noise=(0.0, 0.1),
        gradient_clip=0.09,
        config="smollm2",
    ),
}
SPLITS = {
    "server": {},
    "cluster": {"split.labels": "cluster"},
    "FedAvg": {"strategy": "FedAvg"},
}
ATTACKS = ("nearest", "linear", "learned")


class Variant(NamedTuple):
    """A run of a task."""

    task: str
    split: str
    """Of :data:`SPLITS`."""
    noise: float
    """Multiplier, on activations and on gradients of labels that stay; 0: neither clip nor noise."""
    seed: int


def variants(name: str, noise: Sequence[float], seeds: int) -> list[Variant]:
    """Return a task's variants; noise only where activations are sent."""
    splits = {split: noise if split == "server" or TASKS[name].gradient_clip else (0.0,) for split in SPLITS}
    splits["FedAvg"] = (0.0,)
    return [Variant(name, split, z, seed) for seed in range(seeds) for split, levels in splits.items() for z in levels]


def measure(variant: Variant, sets: Sequence[str], rounds: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Train one variant, and attack it; returns its line."""
    task = TASKS[variant.task]
    run_dir = folder / "-".join(map(str, variant))
    keys = {**task.sets, **SPLITS[variant.split], "seed": variant.seed, "evaluate-every": 0, "checkpoint-every": 0}
    if variant.noise:
        keys |= {"privacy.activation-clip": task.clip, "privacy.activation-noise": variant.noise}
    if variant.noise and variant.split == "cluster":
        keys |= {"privacy.gradient-clip": task.gradient_clip, "privacy.gradient-noise": variant.noise}
    keys |= {"num-rounds": rounds} if rounds else {}
    if not (run_dir / "summary.json").is_file():
        train(task.config, [*as_settings(keys), *sets], run_dir)
    attack = ["--noise", f"{variant.noise:g}", "--tokens", str(tokens), "--seed", str(variant.seed), "--cut-only"]
    reading = json.loads(collapipe("leakage", str(run_dir), *attack, "--json"))
    (level,) = reading["levels"]
    (cut,) = level["depths"]
    sends = variant.split == "server" or bool(task.gradient_clip and variant.split == "cluster")
    best = max(ATTACKS, key=lambda name: (cut[name]["top1"], cut[name]["top5"]))
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        **variant._asdict(),
        "rounds": summary["rounds"],
        "privacy": summary.get("privacy"),
        "metrics": summary["metrics"],
        "metrics_under_noise": level["metrics"],
        "tokens_read": cut[best] | {"attack": best} if sends else None,
        "attacks": {name: cut[name] for name in ATTACKS} if sends else None,
        "labels_read": reading["labels"][0] if sends and variant.split == "cluster" else None,
        "without_looking": reading["without_looking"],
        "updates": reading["updates"],
        "membership": reading["membership"],
        "victims": reading["victims"]["tokens"],
    }


def epsilon(row: Mapping[str, Any]) -> float:
    """Epsilon of one example's activations."""
    return float(row["privacy"]["activations"]["epsilon"])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of Markdown: means and deviations over the seeds."""
    lines = [
        "| task | labels | noise (epsilon) | tokens, % | labels, % | update: one example/a batch, % | membership "
        "| score/with noise on |",
        f"|{' --- |' * 8}",
    ]
    blind = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        score = TASKS[task].score
        for split, noise in dict.fromkeys((row["split"], row["noise"]) for row in of_task):
            same = [row for row in of_task if (row["split"], row["noise"]) == (split, noise)]
            cells = [task, split, f"{noise:g} ({statistics.fmean(map(epsilon, same)):,.0f})" if noise else "off"]
            if any(row["tokens_read"] is None for row in same):
                told = [row["updates"][0]["labels"] for row in same]
                cells += ["-", "-" if None in told else f"{_share(told)}, update"]
            else:
                cells.append(_share([row["tokens_read"]["top1"] for row in same]))
                labels = [row["labels_read"] for row in same]
                cells.append("sent" if None in labels else _share([each["top1"] for each in labels]))
            # The update of one step: of one example, and of a batch.
            cells.append("/".join(_share([row["updates"][which]["read"] for row in same]) for which in (0, -1)))
            cells.append(f"{statistics.fmean(row['membership']['auc'] for row in same):.2f}")
            both = (_mean([row[where][score] for row in same]) for where in ("metrics", "metrics_under_noise"))
            cells.append("/".join(dict.fromkeys(both)))
            lines.append(f"| {' | '.join(cells)} |")
        blind.append(f"{_share([row['without_looking']['top1'] for row in of_task])} ({task})")
    return [*lines, "", f"A guess without looking reads, in %: {', '.join(blind)}."]


def _share(shares: Sequence[float]) -> str:
    """Write a mean in per cent, with the deviation where there is one."""
    mean, deviation = 100 * statistics.fmean(shares), 100 * statistics.stdev(shares) if len(shares) > 1 else 0.0
    return f"{mean:.1f}±{deviation:.1f}" if deviation >= 0.05 else f"{mean:.1f}"


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g}" + (f"±{statistics.stdev(values):.1g}" if len(values) > 1 else "")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="classes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--noise", default="", help="multipliers, 0: neither clip nor noise; without: the task's")
    parser.add_argument("--rounds", type=int, default=0, help="0: those of the task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20_000, help="most tokens to learn the attack from, and to read")
    parser.add_argument("--out", type=Path, help="append each run's line to this file, and skip runs that it holds")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and train none again that it holds")
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    try:
        args.noise = [float(part) for part in args.noise.split(",")] if args.noise else TASKS[args.task].noise
    except ValueError:
        parser.error(f"--noise: expected numbers with commas, such as 0,0.3; found {args.noise!r}")
    if not args.noise or min(args.noise) < 0:
        parser.error("--noise: expected multipliers of at least 0")
    return args


def main() -> int:
    """Run every variant, print the table."""
    args = arguments()
    say = sys.stderr if args.json else sys.stdout
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    measured = {Variant(*(row[name] for name in Variant._fields)) for row in rows}
    with tempfile.TemporaryDirectory(prefix="collapipe-leakage-") as folder:
        for variant in variants(args.task, args.noise, args.seeds):
            if variant in measured:
                continue
            row = measure(variant, args.sets, args.rounds, args.tokens, args.runs or Path(folder))
            rows.append(row)
            read = row["tokens_read"]["top1"] if row["tokens_read"] else 0.0
            print(f"{variant}: {read:.1%} read, {row['metrics']}", file=sys.stderr, flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)), file=say)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
