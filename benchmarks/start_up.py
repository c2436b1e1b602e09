"""Time from ``collapipe run`` to the end of round 1, its phases, and its ratio to the time of an import.

    ratio = (seconds to the end of round 1) / (seconds of: import torch, transformers; transformers.AutoModel)

Both in turn, so that both meet about the same load; the figures are medians. A run is watched from outside: a phase
ends when the process begins that the next one needs, or when Flower's log says so.

    python benchmarks/start_up.py                       a table
    python benchmarks/start_up.py --json                {"import_s": .., "rows": [{"program": .., "round_1_s": ..,
                                                        "ratio": .., "cpu_s": .., "total_s": .., "phases": {..}}]}
    python benchmarks/start_up.py --program OTHER/bin/collapipe --program bin/collapipe         two versions, in turn
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

IMPORT = "import torch, transformers; transformers.AutoModel"
POLL_S = 0.03
PATIENCE_S = 900.0
PROCESSES = {
    "flower-superlink": "command reads its configuration",
    "flower-superexec": "SuperLink",
    "flwr-simulation": "Flower takes the app",
    "gcs_server": "Flower's simulation",
    "raylet/raylet": "Ray's head",
    "ray::ClientAppActor": "Flower's workers",
}
"""Words of a command line when a phase has ended, and the phase."""
LINES = {"trains on": "set-up", "[ROUND 1": "strategy"}
"""Words of Flower's log when a phase has ended, and the phase."""
ROUND = "round 1"


class WatchedRun:
    """One run of the default configuration, and the moment at which each phase ended."""

    def __init__(self, program: str, sets: Sequence[str], folder: Path) -> None:
        settings = ["num-rounds=1", f"runs-dir={folder}", *sets]
        command = [program, "run", *(part for text in settings for part in ("--set", text))]
        self._folder = folder
        self.ends: dict[str, float] = {}
        self._cpu: dict[int, float] = {}
        self._start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        root = psutil.Process(process.pid)
        while process.poll() is None and time.monotonic() < self._start + PATIENCE_S:
            if ROUND not in self.ends:
                self._look(root)
            time.sleep(POLL_S)
        output = process.communicate()[0]
        if process.returncode or ROUND not in self.ends:
            logs = "".join(log.read_text(encoding="utf-8", errors="replace") for log in folder.glob("*/logs/*.log"))
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {output}\n{logs[-4000:]}")
        self.total_s = time.monotonic() - self._start
        self.cpu_s = sum(self._cpu.values())

    def _look(self, root: psutil.Process) -> None:
        try:
            children = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for child in children:
            try:
                times, line = child.cpu_times(), " ".join(child.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._cpu[child.pid] = times.user + times.system
            self._note(line, PROCESSES)
        for log in self._folder.glob("*/logs/simulation.log"):
            self._note(log.read_text(encoding="utf-8", errors="replace"), LINES)
        if any(rounds.read_bytes().count(b"\n") for rounds in self._folder.glob("*/rounds.jsonl")):
            self._end(ROUND)

    def _note(self, text: str, phases: dict[str, str]) -> None:
        for mark, phase in phases.items():
            if mark in text:
                self._end(phase)

    def _end(self, phase: str) -> None:
        self.ends.setdefault(phase, time.monotonic() - self._start)

    @property
    def round_1_s(self) -> float:
        """Time to the end of round 1 [s]."""
        return self.ends[ROUND]

    def phases(self) -> dict[str, float]:
        """Length of each phase [s], in the order of their ends."""
        ends = sorted(self.ends.items(), key=lambda entry: entry[1])
        begins = [0.0, *(end for _, end in ends)]
        return {phase: end - begin for (phase, end), begin in zip(ends, begins, strict=False)}


def import_s() -> float:
    """Time of the import that start-up is held against [s]."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
    return time.monotonic() - start


def measure(programs: Sequence[str], sets: Sequence[str], repeats: int) -> dict[str, Any]:
    """Let import and programs take turns; medians over the repeats."""
    imports: list[float] = []
    ratios: dict[str, list[float]] = {program: [] for program in programs}
    runs: dict[str, list[WatchedRun]] = {program: [] for program in programs}
    import_s()  # the first reads files that are in memory afterwards
    for repeat in range(repeats):
        for program in programs if repeat % 2 == 0 else list(reversed(programs)):
            before_s = import_s()
            with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
                run = WatchedRun(program, sets, Path(folder))
            # Before and after: the load of a machine that others use changes within a run.
            around_s = (before_s + import_s()) / 2
            imports.append(around_s)
            ratios[program].append(run.round_1_s / around_s)
            runs[program].append(run)
            print(f"{program}: {run.round_1_s:.1f} s, {ratios[program][-1]:.1f} imports", file=sys.stderr)
    rows = []
    for program in programs:
        names = list(runs[program][0].phases())
        phases = [run.phases() for run in runs[program]]
        rows.append(
            {
                "program": program,
                "round_1_s": statistics.median(run.round_1_s for run in runs[program]),
                "ratio": statistics.median(ratios[program]),
                "cpu_s": statistics.median(run.cpu_s for run in runs[program]),
                "total_s": statistics.median(run.total_s for run in runs[program]),
                "phases": {name: statistics.median(found.get(name, 0.0) for found in phases) for name in names},
            }
        )
    return {"import_s": statistics.median(imports), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own = str(Path(sysconfig.get_path("scripts")) / "collapipe")
    parser.add_argument("--program", action="append", metavar="COLLAPIPE", help=f"default: {own}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one object to standard output and nothing else")
    args = parser.parse_args()
    found = measure(args.program or [own], args.sets, args.repeats)
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"import of torch and transformers: {found['import_s']:.2f} s")
    for row in found["rows"]:
        print(f"\n{row['program']}")
        print(f"  to the end of round 1  {row['round_1_s']:6.1f} s = {row['ratio']:.1f} imports")
        print(f"  processor time         {row['cpu_s']:6.1f} s")
        print(f"  to the end of the run  {row['total_s']:6.1f} s")
        for name, seconds in row["phases"].items():
            print(f"    {name:<22} {seconds:5.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
