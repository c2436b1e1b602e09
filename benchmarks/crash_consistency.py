"""Does a run go on wherever it is cut? Every write of a real run, replayed up to each of its operations.

Two clusters train four rounds, with noise, so that a ledger of releases is kept; every operation at the door to the
disk is recorded in all processes (files, syncs, renames). Then for each prefix of the record, and for each way in which
a crash may take what was not synced, the folder is made anew and read by the code that ``--resume`` runs: the newest
committed round must be there, whole, with what every control unit needs. Some of these folders are really resumed, and
the model at the end is held against that of the run that nothing disturbed, bit for bit.

    python benchmarks/crash_consistency.py [--rounds 4] [--resumes 6] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from client_pipeline.runtime.control_unit import cluster_checkpoint
from flower_app.node.kept_setup import read as read_setup
from flower_app.runs import run_checkpoints, run_directory
from flower_app.saved_model import load_model
from flower_app.training.releases import state_after
from helpers.crash_model import LOSSES, DiskModel, Operation

RECORDER = Path(__file__).parent / "recorded_disk"
CLUSTERS = 2
SETTINGS = {
    "num-clusters": CLUSTERS,
    "scenario": "edge-boxes",
    "policy": "uniform",
    "local-steps": 2,
    "evaluate-every": 1,
    "data.num-examples": 200,
    "data.evaluation-examples": 4,
    "data.vocab-size": 300,
    "batch-size": 8,
    "model.width": 16,
    "model.num-heads": 2,
    "model.feed-forward": 32,
    "model.encoder-layers": 2,
    "model.decoder-layers": 1,
    "task.max-new-tokens": 2,
    "selection.load-best-at-end": "true",
    "privacy.update-clip": 1.0,
    "privacy.update-noise": 0.01,
    "privacy.seed": 7,
}


def run(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line of CollaPipe."""
    command = [sys.executable, "-m", "flower_app.cli", "run", *arguments]
    given = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=1800)


def record(folder: Path, rounds: int) -> tuple[Path, list[Operation]]:
    """Train with every operation recorded; returns the run directory and the record."""
    root, log = folder / "runs", folder / "record"
    root.mkdir(parents=True)
    log.mkdir()
    environment = {
        "RECORDED_ROOT": str(root.resolve()),
        "RECORDED_LOG": str((log / "operations.jsonl").resolve()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(RECORDER.resolve()), os.environ.get("PYTHONPATH")))),
    }
    sets = {**SETTINGS, "num-rounds": rounds, "run-dir": root.resolve() / "run"}
    done = run([part for key, value in sets.items() for part in ("--set", f"{key}={value}")], environment)
    if done.returncode:
        raise SystemExit(f"the run that is recorded failed: {done.stderr[-3000:]}")
    return root / "run", list(_operations(log))


def _operations(log: Path) -> Iterator[Operation]:
    for line in (log / "operations.jsonl").read_text().splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["kind"] in ("fill", "append"):
            value = (log / value).read_bytes()
        yield Operation(entry["kind"], entry["path"], "" if value is None else value)


def read(run_dir: Path, lines: list[Any], least: int, finished: bool) -> str:
    """Result of ``--resume`` in a crashed run's directory: ``resumes``, ``refuses`` or ``finished``.

    Raises
    ------
    AssertionError
        If it would go on from less than what was committed, or from something else.
    """
    summary = run_directory.read_summary(run_dir) if run_dir.is_dir() else None
    if summary is not None and summary["status"] == "finished":
        assert load_model(run_dir)
        return "finished"
    assert not finished, "the summary is lost"
    try:
        config = run_directory.read_run_config(run_dir)
        found = run_checkpoints.reopened(run_dir, config)
    except FileNotFoundError as refusal:
        assert least == 0, f"round {least} was committed, but {refusal}"
        return "refuses"
    assert found.round >= least, f"round {least} was committed, found {found.round}"
    assert run_directory.read_rounds(run_dir)[0] == lines[: found.round], "other lines in rounds.jsonl"
    assert load_model(run_dir)
    privacy, examples = found.state["privacy"], dict.fromkeys(range(CLUSTERS), 100)
    state_after(run_dir, found.round, privacy, examples, found.identity.run)
    for cluster in range(CLUSTERS):
        folder = run_dir / "clusters" / f"cluster-{cluster}"
        told, _ = read_setup(folder)
        assert told["run-identity"] == found.identity.run
        part = cluster_checkpoint.read_checkpoint(folder, found.round, found.identity)
        assert part is not None and part.round == found.round, f"cluster {cluster}: no part of round {found.round}"
    return "resumes"


def committed_after(operations: list[Operation]) -> list[int]:
    """Newest round whose commit had ended, after each number of operations."""
    rounds, newest = [0], 0
    for number, operation in enumerate(operations):
        before = operations[number - 1]
        is_commit = operation.kind == "sync" and operation.path == "run/checkpoint" and before.kind == "rename"
        newest = max(newest, int(str(before.value)[-6:])) if is_commit else newest
        rounds.append(newest)
    return rounds


def replay(folder: Path, run_dir: Path, operations: list[Operation]) -> Counter[str]:
    """Read every prefix after every loss."""
    lines, _ = run_directory.read_rounds(run_dir)
    least, counts = committed_after(operations), Counter[str]()
    end = next(n for n, o in enumerate(operations) if o.kind == "rename" and o.value == "run/summary.json") + 2
    place = folder / "crashed"
    for loss in LOSSES:
        model = DiskModel()
        for done in range(len(operations) + 1):
            shutil.rmtree(place, ignore_errors=True)
            model.write(place, loss)
            try:
                counts[read(place / "run", lines, least[done], done >= end)] += 1
            except Exception as error:
                counts["wrong"] += 1
                where = operations[done - 1][:2] if done else "the beginning"
                print(f"after {done} operations ({where}), loss of {loss}: {error!r}", file=sys.stderr)
            if done < len(operations):
                model.apply(operations[done])
    return counts


def resume(folder: Path, run_dir: Path, operations: list[Operation], number: int) -> list[dict[str, Any]]:
    """Really resume some of the crashed runs."""
    generator, expected, results = random.Random(0), load_file(run_dir / "model" / "model.safetensors"), []
    least = committed_after(operations)
    first = least.index(1)
    end = next(n for n, o in enumerate(operations) if o.kind == "rename" and o.value == "run/summary.json")
    whole = run_dir.with_name("undisturbed")
    run_dir.rename(whole)
    for i in range(number):
        done = first + (end - 1 - first) * i // max(number - 1, 1)
        loss = generator.choice(LOSSES)
        model = DiskModel()
        for operation in operations[:done]:
            model.apply(operation)
        shutil.rmtree(run_dir, ignore_errors=True)
        place = folder / "crashed"
        shutil.rmtree(place, ignore_errors=True)
        model.write(place, loss)
        # In its own place: a run's folder is known by its path.
        (place / "run").rename(run_dir)
        start = time.monotonic()
        ended = run(["--resume", str(run_dir)])
        equal = False
        if ended.returncode == 0:
            weights = load_file(run_dir / "model" / "model.safetensors")
            equal = weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in expected)
        wall_s = round(time.monotonic() - start, 1)
        results.append({"after": done, "round": least[done], "loss": loss, "equal": equal, "seconds": wall_s})
        if not equal:
            print(f"{results[-1]}: {ended.stderr[-2000:]}", file=sys.stderr)
    return results


def main() -> int:
    """Print the table, or one JSON object; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--resumes", type=int, default=6, help="crashed runs that are really resumed")
    parser.add_argument("--folder", type=Path, help="for the runs; must not exist; kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crash-"))
    try:
        run_dir, operations = record(folder, options.rounds)
        kinds = Counter(operation.kind for operation in operations)
        counts = replay(folder, run_dir, operations)
        resumes = resume(folder, run_dir, operations, options.resumes)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    found = {"operations": dict(kinds), "states": dict(counts), "resumes": resumes}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{sum(kinds.values())} operations: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        print(f"{sum(counts.values())} states: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
        for entry in resumes:
            print(", ".join(f"{key} {value}" for key, value in entry.items()))
    return int(bool(counts["wrong"]) or not all(entry["equal"] for entry in resumes))


if __name__ == "__main__":
    sys.exit(main())
