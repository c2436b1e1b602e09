"""How much memory does a control unit need for a corpus of millions of lines?

Generates parallel text, trains a tiny translation model on it for a few rounds with ``collapipe run``, and prints the peak
of the control unit's process since its start: reading, sharing out, encoding and training. A small corpus beside it shows
what the process takes without any data: Python, torch and Ray.

    python benchmarks/large_corpus.py [--lines 5000000] [--rounds 3] [--clusters 1] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flower_app.tasks.generator import generate

SENTENCES = 20_000
"""Different sentences that the grammar draws; a line is two of them, so 400 million different lines are possible."""
SETTINGS = {
    "evaluate-every": "0",
    "local-steps": "2",
    "batch-size": "32",
    "data.source": "files",
    "data.train-source": "train.en",
    "data.train-target": "train.de",
    "data.validation-source": "validation.en",
    "data.validation-target": "validation.de",
    "data.max-length": "64",
    "data.vocab-size": "1000",
    "model.width": "32",
    "model.feed-forward": "64",
    "model.decoder-layers": "1",
    "model.max-length": "64",
    "task.max-new-tokens": "4",
}


def write_corpus(folder: Path, lines: int) -> int:
    """Write the corpus; returns its size [byte]."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, rng = generate(SENTENCES, "train", 0), random.Random(0)
    with (folder / "train.en").open("w") as english, (folder / "train.de").open("w") as german:
        for _ in range(lines):
            (one, eins), (two, zwei) = rng.choice(pairs), rng.choice(pairs)
            english.write(f"{one} {two}\n")
            german.write(f"{eins} {zwei}\n")
    for side, language in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in generate(20, "validation", 0))
        (folder / f"validation.{language}").write_text(text)
    return sum((folder / f"train.{language}").stat().st_size for language in ("en", "de"))


def measure(folder: Path, lines: int, rounds: int, clusters: int) -> dict[str, Any]:
    """Train on a corpus of so many lines."""
    size = write_corpus(folder, lines)
    run_dir = folder / "run"
    settings = SETTINGS | {"data.path": folder, "run-dir": run_dir, "num-rounds": rounds, "num-clusters": clusters}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flower_app.cli", "run", *options], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    records = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    units = [report for record in records for report in record["clusters"]]
    return {
        "lines": lines,
        "corpus_bytes": size,
        "clusters": clusters,
        "examples_of_a_cluster": max(unit["num_examples"] for unit in units),
        "control_unit_peak_bytes": max(unit["peak_bytes"] for unit in units),
        "run_s": seconds,
        "rounds_s": sum(record["round_s"] for record in records[1:]),
        "loss": records[-1]["train_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clusters", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--folder", type=Path, help="where corpus and run go (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        rows = [
            measure(folder / str(lines), lines, arguments.rounds, arguments.clusters)
            for lines in (10_000, arguments.lines)
        ]
    if arguments.json:
        print(json.dumps({"corpora": rows}))
        return
    print("    lines   text MB   examples of a cluster   peak of its control unit MB   run s")
    for row in rows:
        print(
            f"{row['lines']:>9,}   {row['corpus_bytes'] / 1e6:>7.0f}   {row['examples_of_a_cluster']:>21,}   "
            f"{row['control_unit_peak_bytes'] / 1e6:>27.0f}   {row['run_s']:>5.0f}"
        )


if __name__ == "__main__":
    main()
