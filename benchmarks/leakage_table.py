"""Protection and cost of noise on the activations: train with each level, then attack.

Every variant is a whole ``collapipe run`` of the same small task with as many rounds, its activations clipped and
noised as ``[privacy]`` says, and then ``collapipe leakage`` on that run: the attacks read held-out sentences behind all
TEBs, where the server does. A line of ``--out`` is one run; the table has means over the seeds.

    python benchmarks/leakage_table.py                                     # 12 runs, on generated text
    python benchmarks/leakage_table.py --seeds 1 --noise 0,1 --rounds 4 --json
    python benchmarks/leakage_table.py --set task.name=token-classification
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A small BERT: what it sends has passed a LayerNorm, so that every token's norm is near the square root of the width.
DEFAULT_SETS = (
    "task.name=sequence-classification",
    "model.family=bert",
    "model.encoder-layers=2",
    "data.num-examples=8000",
    "scenario=edge-boxes",
    "batch-size=64",
    "local-steps=8",
    "optimizer.lr=0.003",
)
ATTACKS = ("nearest", "linear", "learned")


class Variant(NamedTuple):
    """Change of a run's activations; a clip of 0: none."""

    clip: float
    noise: float
    seed: int


def collapipe(*words: str) -> str:
    """Run a command; returns what it printed."""
    done = subprocess.run([sys.executable, "-m", "flower_app.cli", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"collapipe {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def measure(variant: Variant, sets: Sequence[str], rounds: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Train one variant, and attack it; returns its line."""
    run_dir = folder / f"noise-{variant.noise:g}-seed-{variant.seed}"
    own = {"seed": variant.seed, "num-rounds": rounds, "evaluate-every": 0, "checkpoint-every": 0, "run-dir": run_dir}
    if variant.clip:
        own |= {"privacy.activation-clip": variant.clip, "privacy.activation-noise": variant.noise}
    items = [word for text in (*sets, *(f"{k}={v}" for k, v in own.items())) for word in ("--set", text)]
    if not (run_dir / "summary.json").is_file():
        collapipe("run", *items)
    attack = (
        "--noise",
        f"{variant.noise:g}",
        "--tokens",
        str(tokens),
        "--seed",
        str(variant.seed),
        "--cut-only",
        "--json",
    )
    found = json.loads(collapipe("leakage", str(run_dir), *attack))
    (level,) = found["levels"]
    (cut,) = level["depths"]
    best = max(ATTACKS, key=lambda name: (cut[name]["top1"], cut[name]["top5"]))
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        **variant._asdict(),
        "rounds": summary["rounds"],
        "privacy": summary.get("privacy"),
        "metrics": summary["metrics"],
        "metrics_under_noise": level["metrics"],
        "tokens_read": cut[best] | {"attack": best},
        "attacks": {name: cut[name] for name in ATTACKS},
        "without_looking": found["without_looking"],
        "updates": found["updates"],
        "membership": found["membership"],
        "victims": found["victims"]["tokens"],
    }


def epsilon(row: dict[str, Any]) -> float:
    """Epsilon of one example; infinite without noise."""
    return float(row["privacy"]["activations"]["epsilon"]) if row["privacy"] else math.inf


def table(rows: Sequence[dict[str, Any]], metric: str) -> list[str]:
    """Rows of Markdown: means over the seeds, and their spread."""

    def cell(shares: Sequence[float]) -> str:
        spread = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
        return f"{100 * statistics.fmean(shares):.1f}{spread} %"

    # Rows of older versions have none.
    with_updates = all(row.get("updates") for row in rows)
    lines = [
        f"| noise | epsilon of an example | tokens read, first guess | first five | {metric} | {metric}, noise on |"
        + " one example's update | a batch's | membership |" * with_updates,
        "| --- | --- | --- | --- | --- | --- |" + " --- | --- | --- |" * with_updates,
    ]
    levels = sorted({(bool(row["clip"]), row["noise"]) for row in rows})
    for clipped, noise in levels:
        own = [row for row in rows if (bool(row["clip"]), row["noise"]) == (clipped, noise)]
        name = f"{noise:g}" if noise else f"0, clip {own[0]['clip']:g}" if clipped else "off"
        spent = statistics.fmean(map(epsilon, own))
        cells = [name, f"{spent:,.0f}" if math.isfinite(spent) else "none"]
        cells += [cell([row["tokens_read"][top] for row in own]) for top in ("top1", "top5")]
        cells += [cell([row[where][metric] for row in own]) for where in ("metrics", "metrics_under_noise")]
        if with_updates:
            # Of one step: of one example, and of a batch.
            cells += [cell([row["updates"][which]["read"] for row in own]) for which in (0, -1)]
            told = [row["membership"]["auc"] for row in own if "auc" in row["membership"]]
            cells.append(f"{statistics.fmean(told):.2f}" if told else "-")
        lines.append(f"| {' | '.join(cells)} |")
    blind = [[row["without_looking"][top] for row in rows] for top in ("top1", "top5")]
    guessed = " | ".join(cell(numbers) for numbers in blind)
    return [*lines, f"| guessing without looking | 0 | {guessed} | | |" + " | | |" * with_updates]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--noise", default="0,0.3,1,3", help="multipliers of the runs; 0: neither clip nor noise")
    parser.add_argument("--clip", type=float, default=8.0, help="largest norm of an activation where there is noise")
    parser.add_argument("--metric", default="accuracy", help="of the test set")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20_000, help="most tokens to learn the attack from, and to read")
    parser.add_argument("--out", type=Path, help="append each run's line to this file, and skip runs that it holds")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and train none again that it holds")
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    try:
        args.noise = [float(part) for part in args.noise.split(",")]
    except ValueError:
        parser.error(f"--noise: expected numbers with commas, such as 0,0.3; found {args.noise!r}")
    if not args.noise or min(args.noise) < 0 or args.clip <= 0:
        parser.error("--noise, --clip: expected multipliers of at least 0, and a clip above 0")
    return args


def main() -> int:
    """Run every variant, print the table."""
    args = arguments()
    say = sys.stderr if args.json else sys.stdout
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    done = {Variant(row["clip"], row["noise"], row["seed"]) for row in rows}
    wanted = [Variant(args.clip if z else 0.0, z, seed) for seed in range(args.seeds) for z in args.noise]
    with tempfile.TemporaryDirectory(prefix="collapipe-leakage-") as folder:
        for variant in wanted:
            if variant in done:
                continue
            row = measure(variant, [*DEFAULT_SETS, *args.sets], args.rounds, args.tokens, args.runs or Path(folder))
            rows.append(row)
            read, score = row["tokens_read"]["top1"], row["metrics"][args.metric]
            text = f"noise {variant.noise:g}, seed {variant.seed}: {read:.1%} read, {args.metric} {score:.3f}"
            print(text, file=sys.stderr, flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    rows = [row for row in rows if Variant(row["clip"], row["noise"], row["seed"]) in wanted]
    print("\n".join(table(rows, args.metric)), file=say)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
