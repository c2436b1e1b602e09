"""Memory of each process of a run: runs a command and watches what it starts.

Private memory (USS) is what would be free if the process ended: pages of files that others map too are not in it. The
sum over all processes is of PSS, which shares such pages out. Both are peaks, sampled.

    python benchmarks/process_memory.py [--interval 1] [--out FILE.json] -- collapipe run --config FILE
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

ROLES = (
    ("control unit", "ray::ControlUnit"),
    ("device", "ray::Device"),
    ("shared actor", "ray::Shared"),
    ("worker", "ray::ClientAppActor"),
    ("idle worker", "ray::IDLE"),
    ("server", "flwr-simulation"),
    ("superlink", "flower-superlink"),
    ("ray", "raylet"),
    ("ray", "gcs_server"),
    ("ray", "/ray/"),
)
"""Role of a process, and what its command line holds; the first that fits counts."""


def role_of(command: str) -> str:
    """Role of a process by its command line."""
    return next((role for role, mark in ROLES if mark in command), "other")


def watch(command: list[str], interval_s: float) -> dict[str, Any]:
    """Run a command; returns its peaks.

    Returns
    -------
    ``processes``: role, and peaks of USS and PSS [byte] of each; ``total_pss``: the largest sum at one time [byte],
    of which ``pss_by_role`` was whose, ``total_at_s`` after the start.
    """
    run = subprocess.Popen(command)
    # Who ends this program ends the command with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _watched(run, interval_s)
    finally:
        signal.signal(signal.SIGTERM, before)
        if run.poll() is None:
            run.terminate()
            run.wait()


def _watched(run: subprocess.Popen[bytes], interval_s: float) -> dict[str, Any]:
    peaks: dict[int, dict[str, Any]] = {}
    total, total_at_s, pss_by_role, sampled = 0, 0.0, Counter[str](), 0
    begun = time.monotonic()
    while run.poll() is None:
        now: Counter[str] = Counter()
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            try:
                info, text = process.memory_full_info(), " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            peak = peaks.setdefault(process.pid, {"role": "other", "command": text[:100], "uss": 0, "pss": 0})
            if (role := role_of(text)) not in ("other", "idle worker") or peak["role"] == "other":
                peak["role"], peak["command"] = role, text[:100]
            peak["uss"], peak["pss"] = max(peak["uss"], info.uss), max(peak["pss"], info.pss)
            now[peak["role"]] += info.pss
        if now.total() > total:
            total, total_at_s, pss_by_role = now.total(), time.monotonic() - begun, now
        sampled += 1
        time.sleep(interval_s)
    return {
        "processes": list(peaks.values()),
        "total_pss": total,
        "total_at_s": total_at_s,
        "pss_by_role": dict(pss_by_role),
        "samples": sampled,
        "returncode": run.returncode,
    }


def main() -> None:
    """Run, and print the largest process of each role."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, help="JSON file of all processes")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    result = watch(arguments.command, arguments.interval)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    by_role = defaultdict(list)
    for process in result["processes"]:
        by_role[process["role"]].append(process)
    print(f"{'role':14} {'processes':>9} {'largest USS':>12} {'mean USS':>10}   [MB]")
    for role, processes in sorted(by_role.items()):
        sizes = [process["uss"] / 1e6 for process in processes]
        print(f"{role:14} {len(sizes):9} {max(sizes):12.0f} {sum(sizes) / len(sizes):10.0f}")
    print(f"all processes: {result['total_pss'] / 1e6:.0f} MB (PSS, the largest sum of {result['samples']} samples)")
    sys.exit(result["returncode"])


if __name__ == "__main__":
    main()
