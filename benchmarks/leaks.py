"""Does a long run leak? Runs the default run for 100 rounds and watches its whole process tree from outside.

Memory is the sum of what each process has to itself (USS), so that shared libraries count once. Reported: growth of
memory and of the number of processes from round 10 to the end, and processes that are left when the run is over.

    python benchmarks/leaks.py [--rounds 100] [--set key=value ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

GROWTH_LIMIT = 0.05


def sample(root: psutil.Process) -> tuple[int, int]:
    """Number of processes below ``root``, and their memory [byte]."""
    count = total = 0
    for process in root.children(recursive=True):
        try:
            total += process.memory_full_info().uss
            count += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return count, total


def rounds_done(runs: Path) -> int:
    """Rounds that the run has written."""
    file = runs / "latest" / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(num_rounds: int, sets: list[str]) -> dict[str, object]:
    """Run and sample until it ends."""
    with tempfile.TemporaryDirectory(prefix="collapipe-leaks-") as folder:
        runs = Path(folder) / "runs"
        command = [sys.executable, "-m", "flower_app.cli", "run"]
        for item in [f"num-rounds={num_rounds}", f"runs-dir={runs}", *sets]:
            command += ["--set", item]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        root = psutil.Process(run.pid)
        seen: dict[int, psutil.Process] = {}
        samples: list[tuple[int, int, int]] = []
        while run.poll() is None:
            done = rounds_done(runs)
            try:
                samples.append((done, *sample(root)))
                seen.update({p.pid: p for p in root.children(recursive=True)})
            except psutil.NoSuchProcess:
                break
            time.sleep(1.0)
        code = run.wait(timeout=60)
    # The guard that clears up after a killed run ends a moment after the run itself.
    _, left = psutil.wait_procs(list(seen.values()), timeout=15)
    early = [s for s in samples if 10 <= s[0] < 20]
    # The last tenth, but not the scoring of the test set after the last round.
    late = [s for s in samples if num_rounds - max(num_rounds // 10, 1) <= s[0] < num_rounds]
    if not early or not late:
        raise SystemExit(f"the run ended with exit code {code} before its memory could be compared")
    memory = [statistics.median(s[2] for s in part) for part in (early, late)]
    return {
        "exit_code": code,
        "rounds": num_rounds,
        "memory_round_10_mb": round(memory[0] / 1e6, 1),
        "memory_end_mb": round(memory[1] / 1e6, 1),
        "memory_growth": round(memory[1] / memory[0] - 1, 4),
        "processes_round_10": int(statistics.median(s[1] for s in early)),
        "processes_end": int(statistics.median(s[1] for s in late)),
        "processes_left": len(left),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = watch(arguments.rounds, arguments.sets)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):<24} {value}")
    leak = result["processes_left"] or result["processes_end"] > result["processes_round_10"]  # type: ignore[operator]
    return int(bool(result["exit_code"] or leak or result["memory_growth"] > GROWTH_LIMIT))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
