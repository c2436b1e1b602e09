"""Quality of what `collapipe init` writes: from a CSV with named columns to predictions, beside the tuned recipe.

A folder of real text (``train.tsv``, ``dev.tsv``, perhaps ``test.tsv``: label number, tab, text; ``labels.txt``: their
names) is written as CSV files with a header, as somebody's own data would come. Then three commands, as a new user
gives them: ``init train.csv``, ``run --config collapipe.toml``, ``predict latest --file held-out.csv``; the accuracy is
that of the column ``prediction``. The tuned recipe of the same name trains on the same text with the same seed.

    python benchmarks/own_data.py --data FOLDER                       # trec6 and toutiao, three seeds each
    python benchmarks/own_data.py --data FOLDER --only trec6 --seeds 1 --how init --json
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commands import collapipe

TEXTS = {"trec6": ("question", "test"), "toutiao": ("title", "dev")}
"""Name of a folder and of its tuned recipe -> the column of the texts, the held-out file."""
WAYS = ("init", "tuned")
ROWS = Path("docs/results/own-data/rows.jsonl")


def write_tables(source: Path, column: str, folder: Path) -> None:
    """Write each ``.tsv`` file of a folder as a CSV file with a header, labels by their names."""
    names = (source / "labels.txt").read_text(encoding="utf-8").split()
    for table in source.glob("*.tsv"):
        with (folder / f"{table.stem}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([column, "kind"])
            for line in table.read_text(encoding="utf-8").splitlines():
                label, _, text = line.partition("\t")
                rows.writerow([text, names[int(label)]])


def predicted_share(folder: Path, held_out: str) -> float:
    """Predict a table with the newest run of a folder; returns the share of rows that are right."""
    collapipe("predict", "latest", "--file", f"{held_out}.csv", "--out", "predicted.csv", folder=folder)
    with (folder / "predicted.csv").open(encoding="utf-8", newline="") as file:
        return statistics.fmean(row["prediction"] == row["kind"] for row in csv.DictReader(file))


def measure(name: str, how: str, seed: int, source: Path) -> dict[str, Any]:
    """Train one way with one seed; returns its row."""
    column, held_out = TEXTS[name]
    with tempfile.TemporaryDirectory(prefix="collapipe-own-data-") as made:
        folder, started = Path(made), time.perf_counter()
        write_tables(source, column, folder)
        if how == "init":
            collapipe("init", "train.csv", folder=folder)
            collapipe("run", "--config", "collapipe.toml", "--set", f"seed={seed}", folder=folder)
            accuracy = predicted_share(folder, held_out)
        else:
            collapipe("run", "--config", name, "--set", f"data.path={source}", "--set", f"seed={seed}", folder=folder)
            split = "test" if held_out == "test" else "validation"
            accuracy = None
        run_dir = (folder / "runs" / "latest").resolve()
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        rounds = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        if accuracy is None:
            scored = summary["metrics"] if split == "test" else rounds[-1]["metrics"]
            accuracy = scored["accuracy"]
        return {
            "text": name,
            "how": how,
            "seed": seed,
            "held_out": held_out,
            "rounds": summary["rounds"],
            "accuracy": round(accuracy, 4),
            "train_loss": round(rounds[-1]["train_loss"], 4),
            "seconds": round(time.perf_counter() - started, 1),
        }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown: the mean accuracy of both ways, from the least to the largest, and their difference."""
    lines = ["| text | held out | as `init` wrote it | tuned recipe | difference |", "| --- | --- | --- | --- | --- |"]
    for name in dict.fromkeys(row["text"] for row in rows):
        shares = {how: [r["accuracy"] for r in rows if (r["text"], r["how"]) == (name, how)] for how in WAYS}
        cells = [
            f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
            for values in shares.values()
        ]
        known = all(shares.values())
        points = 100 * (statistics.fmean(shares["init"]) - statistics.fmean(shares["tuned"])) if known else 0.0
        cells.append(f"{points:+.1f} points" if known else "-")
        lines.append(f"| {name} | `{TEXTS[name][1]}` | {' | '.join(cells)} |")
    return lines


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the folders of the texts")
    parser.add_argument("--only", default=",".join(TEXTS), help=f"of {', '.join(TEXTS)}, with commas")
    parser.add_argument("--how", default=",".join(WAYS), help="init, tuned, or both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROWS, help="gets each row; what it holds is not trained again")
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    args.only, args.how = args.only.split(","), args.how.split(",")
    if set(args.only) - set(TEXTS) or set(args.how) - set(WAYS):
        parser.error(f"--only and --how: expected some of {', '.join(TEXTS)}, and of {', '.join(WAYS)}")
    return args


def main() -> int:
    """Train what is not there yet, print the table."""
    args = arguments()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["text"], row["how"], row["seed"]) for row in rows}
    for name in args.only:
        for seed in range(args.seeds):
            for how in args.how:
                if (name, how, seed) in done:
                    continue
                row = measure(name, how, seed, (args.data / name).resolve())
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
