"""What ``collapipe quote --after`` says of the rest of a run, beside what the rest then takes on this machine.

A pilot of a few rounds measures the machine (``costs = "measured"``); its rest is quoted, and then trained. Compared
are sums over those rounds: seconds of the slowest cluster's local steps and upload (with what the first round of a
start takes more), bytes that go up and between devices, and the most that each device holds. The machine should have
nothing else to do.

    python benchmarks/quote_accuracy.py                                    # the default run, three minutes
    python benchmarks/quote_accuracy.py --config trec6-minilm --set data.path=FOLDER --set model.pretrained=MODEL
    python benchmarks/quote_accuracy.py --trials 3 --rows rows.jsonl --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import as_settings, collapipe, train

FIGURES = ("seconds", "uplink_bytes", "link_bytes", "memory_bytes")


def trial(config: str, sets: Sequence[str], pilot: int, rounds: int, run_dir: Path) -> dict[str, Any]:
    """Train a pilot, quote the rest, and train that; returns both sides of each figure."""
    keys = {"costs": "measured", "num-rounds": pilot, "evaluate-every": 0, "checkpoint-every": pilot}
    train(config, [*sets, *as_settings(keys)], run_dir)
    more = ("--set", f"num-rounds={rounds}")
    quoted = json.loads(collapipe("quote", "--after", str(run_dir), *more, "--json"))
    collapipe("run", "--resume", str(run_dir), *more)
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    rest = [line for line in lines if line["round"] > pilot]
    reports = [report for line in rest for report in line["clusters"]]
    held: dict[tuple[int, int], int] = {}
    for report in reports:
        for device, values in report["devices"].items():
            place = report["cluster"], int(device)
            held[place] = max(held.get(place, 0), values["held_bytes"])
    boxes = {(box["cluster"], box["device"]): box["memory_bytes"] for box in quoted["boxes"] if box["share"]}
    seconds = [
        max(p["measured_train_s"] + (p["measured_upload_s"] or 0.0) for p in line["plan"]["predictions"])
        for line in rest
    ]
    taken = {
        "seconds": sum(seconds),
        "uplink_bytes": sum(report["payload_bytes"][kind] for report in reports for kind in ("up", "update")),
        "link_bytes": sum(report["link_bytes"] for report in reports),
        "memory_bytes": max(held.values()),
    }
    # Of the devices that train in these rounds the one whose need is said worst.
    worst = max((held[place] / boxes[place] - 1 for place in held if place in boxes), key=abs)
    return {
        "pilot": pilot,
        "rounds": rounds - pilot,
        "quoted": {
            "seconds": quoted["seconds"] + quoted["start_s"],
            **{name: quoted[name] for name in ("uplink_bytes", "link_bytes", "start_s")},
            "memory_bytes": max(boxes.values()),
        },
        "taken": taken,
        "worst_device": worst,
        "same_devices": held.keys() == boxes.keys(),
        "round_seconds": seconds,
    }


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Return (taken - quoted) / quoted of each figure; what neither side has is no error."""
    quoted, taken = row["quoted"], row["taken"]
    return {name: taken[name] / quoted[name] - 1 if quoted[name] else float(taken[name] > 0) for name in FIGURES}


def main() -> int:
    """Print each trial, and the median of the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="", help="a TOML file, or a name in configs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--pilot", type=int, default=8, help="rounds that measure")
    parser.add_argument("--rounds", type=int, default=16, help="of pilot and rest together")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="append each trial's line to this file")
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    say, rows = sys.stderr if args.json else sys.stdout, []
    local = ("data.path=", "model.pretrained=")
    print("".join(f"{name:>14}" for name in (*FIGURES, "worst device")), file=say)
    with tempfile.TemporaryDirectory(prefix="collapipe-quote-") as folder:
        for number in range(args.trials):
            row = trial(args.config, args.sets, args.pilot, args.rounds, Path(folder) / str(number))
            row = {"config": args.config, "sets": [s for s in args.sets if not s.startswith(local)]} | row
            rows.append(row)
            figures = (*errors(row).values(), row["worst_device"])
            print("".join(f"{value:>14.1%}" for value in figures), file=say, flush=True)
            if args.rows:
                with args.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    medians = (statistics.median(errors(row)[name] for row in rows) for name in FIGURES)
    print("".join(f"{value:>14.1%}" for value in medians) + "  median", file=say)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
