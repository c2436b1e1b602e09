"""Does a run survive? Random faults in every round, beside the same run without any; and what recovery saves.

Two clusters of two devices learn to translate generated sentences. In each round and cluster a device is killed with
probability 10 %, the control unit with 5 %, the stream is cut with 2 % and stays so for ten seconds with 3 %, a device
stands still for half a minute with 2 %; the server is killed once, in the middle third of the run, and ``--resume``
goes on. All of it is injected by ``[faults]``. Reported: whether each injected fault is in ``rounds.jsonl`` once; the
longest round; memory, processes and files; the metric beside that of the run without faults; seconds from a fault to
the next finished micro-batch and round, beside a restart from the checkpoint, where a device's death ends the run (one
cluster, with a copy of the TEBs at the beginning of a round alone).

    python benchmarks/soak.py [--rounds 200] [--folder FOLDER] [--set key=value ...] [--json]

Called again with the same folder it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from soak_processes import Family
from soak_report import passed, report, said

from client_pipeline.runtime.control_unit.fault_files import INJECTED
from client_pipeline.runtime.control_unit.fault_injection import server_dies
from client_pipeline.runtime.fault_config import FaultConfig

RATES = {"device": 0.10, "cluster": 0.05, "stream": 0.02, "freeze": 0.02, "partition": 0.03}
POLL_S, SAMPLE_S, SAY_S = 0.1, 3.0, 30.0
END_S = 120.0
"""Time for the processes of a run to be gone once it has ended [s]."""
MOST_STARTS = 25

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 2
devices = 2
seed = 0
[device]
flop-per-cycle = { min = 10.0, max = 24.0 }
frequency-ghz = { min = 0.4, max = 0.8 }
memory-gb = 1.5
[block]
memory-gb = 0.375
[planner]
blocks = 4
batch-size = 16
local-steps = 4
gamma-max = 5.0
"""
SETTINGS = {
    "policy": "uniform",
    "batch-size": 16,
    "local-steps": 4,
    "evaluate-every": 0,
    "data.num-examples": 8000,
    "model.encoder-layers": 4,
    "optimizer.lr": 0.003,
    "runtime.timeout": 120.0,
}


class Soaked:
    """One run of the soak: its folder, and the starts that it takes to finish it.

    Parameters
    ----------
    folder : of the run and of what is noted about it; what is there already is gone on with
    settings : of the run
    stall_s : time without a finished round after which a start counts as hanging, and is ended [s]
    """

    def __init__(self, folder: Path, settings: dict[str, Any], stall_s: float) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._settings, self._stall_s = settings, stall_s
        self._size = self._rounds = 0
        self.at: Callable[[int, Family], None] = lambda round_, family: None
        """Called when a round has finished."""
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def finished(self) -> bool:
        """Tell whether the run wrote that it is done."""
        summary = self.run_dir / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["status"] == "finished"

    def note(self, file: str, **values: Any) -> None:
        """Add a line to a file of this run."""
        with (self.folder / file).open("a") as out:
            out.write(json.dumps({**values, "time": time.time()}) + "\n")

    def finish(self) -> None:
        """Start the run, or go on with it, until it is done."""
        for start in range(MOST_STARTS):
            if self.finished:
                return
            self._start(start)
        if not self.finished:
            raise SystemExit(f"{self.run_dir}: not finished after {MOST_STARTS} starts; see {self.run_dir / 'logs'}")

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "flower_app.cli", "run"]
        if list(self.run_dir.glob("checkpoint/round-*")):
            return [*command, "--resume", str(self.run_dir)]
        # Nothing to go on from; its logs say why.
        if self.run_dir.exists():
            self.run_dir.rename(self.folder / f"run-given-up-{time.time():.0f}")
        for key, value in {**self._settings, "run-dir": self.run_dir}.items():
            command += ["--set", f"{key}={value}"]
        return command

    def _start(self, number: int) -> None:
        command, family = self._command(), Family()
        self._size, self._rounds = 0, 0
        self._new_rounds()
        killed_before = self._server_kills()
        self.note("starts.jsonl", event="start", resumed="--resume" in command, round=self._rounds)
        say(f"{self.folder.name}: {'goes on' if '--resume' in command else 'starts'} after round {self._rounds}")
        with (self.folder / "launcher.log").open("ab") as log:
            launcher = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **family.environment}, start_new_session=True
            )
        why = "soak stopped"
        try:
            why = self._watch(launcher, family)
        finally:
            left = end(launcher, family)
            files = family.files_left()
            if why == "ended" and launcher.returncode:
                why = "server killed" if self._server_kills() > killed_before else "failed"
            self.note("starts.jsonl", event="end", why=why, code=launcher.returncode, processes=left, files=files)
            say(f"{self.folder.name}: {why} (exit code {launcher.returncode}), {len(left)} processes left")

    def _server_kills(self) -> int:
        file = self.run_dir / INJECTED
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _watch(self, launcher: subprocess.Popen[bytes], family: Family) -> str:
        progress = time.monotonic()
        sampled = told = 0.0
        while launcher.poll() is None:
            if rounds := self._new_rounds():
                progress = time.monotonic()
                for round_ in rounds:
                    self.note("arrivals.jsonl", round=round_)
                    self.at(round_, family)
            if time.monotonic() - progress > self._stall_s:
                return "hang"
            if time.monotonic() - sampled > SAMPLE_S:
                sample = family.sample()
                self.note("samples.jsonl", round=self._rounds, **asdict(sample))
                sampled = time.monotonic()
                if sampled - told > SAY_S:
                    told = sampled
                    counts = said(self.run_dir)
                    memory = f"{sample.processes} processes, {sample.uss / 1e6:.0f} MB"
                    say(f"{self.folder.name}: round {self._rounds}/{self._settings['num-rounds']}, {memory}; {counts}")
            time.sleep(POLL_S)
        for round_ in self._new_rounds():
            self.note("arrivals.jsonl", round=round_)
        return "ended"

    def _new_rounds(self) -> list[int]:
        """Rounds whose lines have come since the last call; a run that goes on may take the last line back."""
        file = self.run_dir / "rounds.jsonl"
        size = file.stat().st_size if file.exists() else 0
        if size == self._size:
            return []
        before, self._size = self._rounds, size
        self._rounds = file.read_bytes().count(b"\n")
        return list(range(before + 1, self._rounds + 1))


def end(launcher: subprocess.Popen[bytes], family: Family) -> list[str]:
    """End a start that still runs, politely first; returns what is left of one that has ended."""
    asked = launcher.poll() is None
    if asked:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait(timeout=END_S)
    return family.left(END_S)


class Restarts:
    """Kills a device, or the server, in the middle of the rounds that follow given ones, once each."""

    def __init__(self, run: Soaked, kills: dict[int, str]) -> None:
        self._run, self._kills = run, kills

    def __call__(self, round_: int, family: Family) -> None:
        what = self._kills.get(round_)
        done = self._run.folder / "kills.jsonl"
        if what is None or (done.exists() and f'"round": {round_},' in done.read_text()):
            return
        # Late in the next round, which takes as long as the quickest if no process has to start: what dies in its
        # first step finds the TEBs' copies of the round's beginning.
        lines = (self._run.run_dir / "rounds.jsonl").read_text().splitlines()
        time.sleep(0.7 * min(json.loads(line)["round_s"] for line in lines))
        found = family.find("ray::Device" if what == "device" else "flwr-simulation")
        self._run.note("kills.jsonl", round=round_, kind=what, found=len(found))
        for process in found[:1] if what == "device" else found:
            try:
                process.kill()
            except psutil.Error:
                continue


def fault_config(num_rounds: int, seed: int) -> FaultConfig:
    """The rates, with the first seed from ``seed`` on by which the server dies once, in the middle third."""
    for candidate in range(seed, seed + 10_000):
        config = FaultConfig(**RATES, server=1 / num_rounds, seed=candidate)
        hits = [round_ for round_ in range(2, num_rounds + 1) if server_dies(config, round_) is not None]
        if len(hits) == 1 and num_rounds / 3 <= hits[0] <= 2 * num_rounds / 3:
            return config
    raise SystemExit(f"--rounds {num_rounds}: no seed kills the server once in the middle; take at least 4 rounds")


def say(text: str) -> None:
    """Tell the user."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=3, help="restarts of each kind to compare with")
    parser.add_argument("--seed", type=int, default=0, help="where the search for the faults' seed begins")
    parser.add_argument("--stall", type=float, default=900.0, help="seconds without a round that count as a hang")
    parser.add_argument("--folder", type=Path, help="kept, and gone on with; default: a temporary one")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="collapipe-soak-"))
    try:
        result = soak(folder.resolve(), arguments.rounds, arguments.restarts, arguments.seed, arguments)
    except KeyboardInterrupt:
        say(f"stopped; --folder {folder} goes on")
        return 130
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def soak(folder: Path, num_rounds: int, restarts: int, seed: int, arguments: argparse.Namespace) -> int:
    """Run the three runs and print what they were like."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = dict(item.split("=", 1) for item in arguments.sets)
    common = {**SETTINGS, **{key: value for key, value in sets.items() if not key.startswith("faults.")}}
    (folder / "two.toml").write_text(SCENARIO)
    faults = fault_config(num_rounds, seed)
    ours = {**common, "num-rounds": num_rounds, "scenario": folder / "two.toml"}
    injected = {f"faults.{key}": getattr(faults, key) for key in (*RATES, "server", "seed")}
    injected |= {key: value for key, value in sets.items() if key.startswith("faults.")}
    say(f"folder: {folder}; faults: {injected}")
    runs = {
        "faults": Soaked(folder / "faults", {**ours, **injected, "name": "soak"}, arguments.stall),
        "quiet": Soaked(folder / "quiet", {**ours, "name": "quiet"}, arguments.stall),
    }
    if restarts:
        kills = {2 + n: ("device", "server")[n % 2] for n in range(2 * restarts)}
        alone = {**common, "num-rounds": max(kills) + 2, "scenario": folder / "two.toml", "strategy": "FedAvg"}
        # No copies to go on from, and nobody else to go on with: a device's death ends the run.
        alone |= {"runtime.snapshots": "round", "num-clusters": 1, "local-steps": 24}
        # A stock strategy brings its plan.
        del alone["policy"]
        runs["restarts"] = Soaked(folder / "restarts", alone, arguments.stall)
        runs["restarts"].at = Restarts(runs["restarts"], kills)
    for run in runs.values():
        run.finish()
    found = report(folder, num_rounds)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found) if arguments.json else table(found))
    return 0 if passed(found) else 1


def table(found: dict[str, Any]) -> str:
    """The report for people."""
    lines: list[str] = []

    def rows(title: str, header: Sequence[str], body: Sequence[Sequence[Any]]) -> None:
        cells = [list(header), *([_cell(value) for value in row] for row in body)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines.extend(["", title])
        for n, row in enumerate(cells):
            lines.append("| " + " | ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)) + " |")
            if n == 0:
                lines.append("| " + " | ".join("-" * width for width in widths) + " |")

    for key, value in found["summary"].items():
        lines.append(f"{key.replace('_', ' '):<40} {_cell(value)}")
    counts = found["counts"]
    header = ["fault", "injected", "in a round that died with the server", "recorded", "missed", "not injected"]
    body = [[kind, *(entry[key] for key in COLUMNS)] for kind, entry in counts.items()]
    rows("Faults, injected and in rounds.jsonl", header, body)
    names = ["to the next micro-batch: times", "median [s]", "max [s]"]
    names += ["to the next finished round: times", "median [s]", "max [s]"]
    body = [[row["fault"], *_three(row["micro_batch_s"]), *_three(row["round_s"])] for row in found["recovery"]]
    rows("Recovery", ["after", *names], body)
    header = ["run", "start", "rounds", "processes", "MB", "processes at the end", "MB", "growth"]
    keys = ("run", "start", "rounds", "processes_early", "mb_early", "processes_end", "mb_end", "growth")
    rows("Memory (USS) of all processes", header, [[row[key] for key in keys] for row in found["memory"]])
    for problem in found["problems"]:
        lines.append(f"problem: {problem}")
    return "\n".join(lines)


COLUMNS = ("injected", "died_with_server", "recorded", "missed", "not_injected")


def _three(times: dict[str, Any]) -> list[Any]:
    return [times["times"], times["median"], times["max"]]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
