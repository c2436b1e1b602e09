"""Files of a run: ``runs/<time>-<name>/``.

::

    config.toml               the resolved configuration
    rounds.jsonl              one JSON object per round
    plans/round-0001.json     each round's plan
    timeline.json             the last round's pipelines, modelled and measured; trace.json: the same for Perfetto
    checkpoint/               what the server needs to go on from the last committed round
    releases.json             with noise: what the round under way may release
    clusters/cluster-0/       the same of each control unit, where these run on this machine
    report.html               the run in pictures
    receipt.json              what was predicted, beside what was measured and counted
    model/                    the global model: model.safetensors, spec.json, tokenizer.json, task.json;
                              a link to its version in models/
    waiting.json              whom the round under way waits for, why and since when
    machines.jsonl            which machines it has used: host, cores, memory, versions
    live.json                 what the control units tell of the round under way: faults, devices without a sign of life
    phases.jsonl              what came before the first round and after the last, and when
    answers.json              answers to questions of the test set, before and after the training
    mistakes.json             labels on the test set: scores by class, confusions, the worst examples
    summary.json              how it ended; written last
    logs/                     what the programs said; error.log: where in the code a run failed

``runs/latest`` points to the newest. Files that are replaced are written aside and renamed, so that a reader never
sees half a file; those that a run goes on from are on the disk before anything points to them
(:mod:`client_pipeline.durable`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from client_pipeline import durable
from client_pipeline.documents import json_value
from flower_app.config.removed import without_kept_keys
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.sources import expanded_path, read_config
from flower_app.error_text import error_text
from flower_app.runs.run_lock import check_readable
from flower_app.runs.run_logs import ERROR_LOG, LOGS

SUMMARY = "summary.json"
MISTAKES = "mistakes.json"
ANSWERS = "answers.json"
ROUNDS = "rounds.jsonl"
CONFIG = "config.toml"
LATEST = "latest"
TIMELINE = "timeline.json"
WAITING = "waiting.json"
LIVE = "live.json"
CLUSTERS = "clusters"

FINISHED = "finished"
FAILED = "failed"
BAD_INPUT = "bad-input"
INFEASIBLE = "infeasible"
INTERRUPTED = "interrupted"
STATUSES = (FINISHED, FAILED, BAD_INPUT, INFEASIBLE, INTERRUPTED)
"""Values of the summary's ``status``."""
_RUN_ENDED = "RunNotRunningException"
"""Flower raises it in a server app whose run is over; it is not public."""
RUN_NAME = re.compile(r"\w[\w.-]{0,200}")
"""A run's name as nodes take it: it becomes part of a path there."""


def create_run_directory(runs_dir: str | Path, name: str) -> Path:
    """Make a new, empty run directory, and point ``latest`` to it; return its absolute path."""
    runs = Path(runs_dir).expanduser().resolve()
    durable.make_folders(runs)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for attempt in range(1, 1000):
        run_dir = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            durable.disk.make_folder(run_dir)
        except FileExistsError:
            continue
        durable.disk.sync(runs)
        for folder in ("plans", LOGS):
            durable.make_folders(run_dir / folder)
        with contextlib.suppress(OSError):
            # Some file systems have no links.
            durable.point(runs / LATEST, run_dir.name)
        return run_dir
    raise FileExistsError(f"{runs}: a thousand runs named {stem} exist; choose another name")


def claim_run_directory(run_dir: str | Path) -> Path:
    """Make a run directory that the user names."""
    path = Path(run_dir).expanduser().resolve()
    if (path / CONFIG).exists() or (path / SUMMARY).exists():
        raise ValueError(f"run-dir: {path} holds a run already; name another, or leave run-dir empty for a new one")
    for folder in ("plans", LOGS):
        durable.make_folders(path / folder)
    return path


def check_unused(run_dir: Path) -> None:
    """Refuse a directory in which a run has trained already: two runs would be mixed up."""
    for name in (ROUNDS, "checkpoint"):
        if (run_dir / name).exists():
            raise ValueError(
                f"run-dir: {run_dir} holds a run already ({name}); go on with it (collapipe run --resume), or name "
                "another"
            )


def find_run(run: str | Path, runs_dir: str | Path = "runs") -> Path:
    """Find a run by its directory, its name in ``runs_dir``, or as ``latest``.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none; or if a reader would not come to an end there.
    """
    for candidate in (expanded_path("RUN", run), expanded_path("runs-dir", runs_dir) / run):
        if candidate.is_dir() and (candidate / CONFIG).is_file():
            check_readable(candidate)
            return candidate.resolve()
    raise FileNotFoundError(
        f"run {str(run)!r}: found no run directory (a folder with {CONFIG}) there nor in {Path(runs_dir).resolve()}"
    )


def plain_name(run_dir: Path) -> str:
    """Return the name by which nodes know a run: its directory's, made plain where that has a space or the like.

    A digest of the directory's name keeps two apart that are made plain alike.
    """
    name = run_dir.name
    if RUN_NAME.fullmatch(name):
        return name
    letters = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:100].lstrip("-.")
    return f"{letters or 'run'}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"


def write_config(run_dir: Path, config: RunConfig) -> Path:
    """Write the resolved configuration; that a process continued the run is no part of it."""
    config = replace(config, resume=False)
    return durable.write_text(run_dir / CONFIG, tomli_w.dumps(nested(config.to_flat())))


def read_run_config(run_dir: Path) -> RunConfig:
    """Read the resolved configuration of a run, maybe of an earlier release; no class that it names is imported."""
    return RunConfig.as_sent(without_kept_keys(read_config(run_dir / CONFIG)))


def append_round(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Add one round's line to ``rounds.jsonl``; on return it is on the disk."""
    durable.append_text(run_dir / ROUNDS, _json(record) + "\n")


def read_rounds(run_dir: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines after byte ``offset``.

    Returns
    -------
    The rounds, and the offset from which to go on.

    Raises
    ------
    ValueError
        If a line is no JSON object; the message names the file and the line's beginning.
    """
    return read_objects(run_dir / ROUNDS, offset)


def read_objects(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects in the complete lines of a growing file after byte ``offset``, and the next offset."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    return [_object(path, line) for line in complete.splitlines()], offset + len(complete)


def write_plan(run_dir: Path, round_number: int, plan: Mapping[str, Any]) -> Path:
    """Write the plan of one round."""
    (run_dir / "plans").mkdir(exist_ok=True)
    path = run_dir / "plans" / f"round-{round_number:04d}.json"
    return durable.write_text(path, _json(plan, indent=2), lasting=False)


def write_timeline(run_dir: Path, timeline: Mapping[str, Any]) -> None:
    """Write the last round's pipelines."""
    durable.write_text(run_dir / TIMELINE, _json(timeline), lasting=False)


def write_answers(run_dir: Path, when: str, answers: Sequence[Mapping[str, str]]) -> None:
    """Add the answers ``before`` or ``after`` the training to those that are there; none: nothing is written."""
    if answers:
        text = _json(read_answers(run_dir) | {when: answers})
        durable.write_text(run_dir / ANSWERS, text, lasting=False)


def read_answers(run_dir: Path) -> dict[str, Any]:
    """Read the answers of a run by ``before`` and ``after``; empty where it has none."""
    try:
        answers = json_value((run_dir / ANSWERS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return answers if isinstance(answers, dict) else {}


class Wait(NamedTuple):
    """A cluster that the round under way waits for."""

    reason: str
    since: float
    """Start of the phase, whatever its reason then [s, Unix time]."""


def write_waiting(run_dir: Path, missing: Mapping[int, str]) -> None:
    """Write the clusters that the round under way waits for, with reason and first time; no file without any."""
    if not missing:
        (run_dir / WAITING).unlink(missing_ok=True)
        return
    waits, now = read_waiting(run_dir), time.time()
    clusters = {
        str(cluster): Wait(reason, waits[str(cluster)].since if str(cluster) in waits else now)._asdict()
        for cluster, reason in missing.items()
    }
    durable.write_text(run_dir / WAITING, _json({"clusters": clusters}), lasting=False)


def read_waiting(run_dir: Path) -> dict[str, Wait]:
    """Read the clusters that the round under way waits for; empty without any."""
    waits = _clusters_of_the_moment(run_dir / WAITING)
    return {cluster: Wait(str(wait["reason"]), float(wait["since"])) for cluster, wait in waits.items()}


def _clusters_of_the_moment(path: Path) -> dict[str, Any]:
    """Read what is written anew all the time, and is not synced: what a crash has left of it says nothing."""
    try:
        return dict(_object(path, path.read_bytes())["clusters"])
    except (FileNotFoundError, ValueError, KeyError):
        return {}


def write_live(run_dir: Path, clusters: Mapping[int, Mapping[str, Any]]) -> None:
    """Write what the control units tell of the round under way, by cluster; no file where they tell nothing."""
    if clusters:
        text = _json({"clusters": {str(cluster): news for cluster, news in clusters.items()}})
        durable.write_text(run_dir / LIVE, text, lasting=False)
    else:
        (run_dir / LIVE).unlink(missing_ok=True)


def read_live(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Read what the control units tell of the round under way, by cluster; empty if they tell nothing."""
    return {int(cluster): dict(news) for cluster, news in _clusters_of_the_moment(run_dir / LIVE).items()}


def rounds_mark(run_dir: Path) -> dict[str, Any]:
    """Return length and digest of ``rounds.jsonl`` for :func:`check_rounds`."""
    data = _rounds_data(run_dir)
    return {"rounds-size": len(data), "rounds-sha256": hashlib.sha256(data).hexdigest()}


def check_rounds(run_dir: Path, mark: Mapping[str, Any]) -> None:
    """Refuse a ``rounds.jsonl`` that does not begin with what it held at a mark."""
    size, data = int(mark["rounds-size"]), _rounds_data(run_dir)
    if len(data) < size:
        raise ValueError(f"{run_dir / ROUNDS}: expected at least {size} bytes, found {len(data)}")
    if hashlib.sha256(data[:size]).hexdigest() != mark["rounds-sha256"]:
        raise ValueError(f"{run_dir / ROUNDS}: the first {size} bytes are not those that were written")


def reopen(run_dir: Path, size: int) -> None:
    """Make a run's directory that of a running one again: no summary, rounds up to ``size`` bytes."""
    durable.remove_leftovers(run_dir)
    for name in (SUMMARY, MISTAKES):
        (run_dir / name).unlink(missing_ok=True)
    if len(_rounds_data(run_dir)) > size:
        durable.truncate(run_dir / ROUNDS, size)


def _rounds_data(run_dir: Path) -> bytes:
    try:
        return (run_dir / ROUNDS).read_bytes()
    except FileNotFoundError:
        return b""


def write_summary(run_dir: Path, status: str, **entries: Any) -> Path:
    """Write how the run ended: the last thing that a run writes.

    Parameters
    ----------
    run_dir : the run directory
    status : one of :data:`STATUSES`
    entries : with ``finished``: ``rounds``, ``wall_s``, ``metrics``; otherwise ``error``, a message for the user
    """
    if status not in STATUSES:
        raise ValueError(f"summary status: expected one of {', '.join(STATUSES)}, found {status!r}")
    return durable.write_text(run_dir / SUMMARY, _json({"status": status, **entries}, indent=2))


def write_failure(run_dir: Path, error: BaseException) -> Path:
    """Write that the run ended with ``error``: the user's mistake (ValueError, FileNotFoundError), no plan, a failure.

    A bug may raise these too: so the traceback is kept as ``logs/error.log``. A signal interrupts the run: Flower's
    programs answer it with ``SystemExit(0)``, and Flower ends the run of a server app by an exception of its own. Other
    programs' ends, and panics of libraries in Rust, are failures though they are no ``Exception``.
    """
    # A file of our own: the launcher ends all programs at the summary, maybe before they have passed on their logs.
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        # On a full disk the summary, which is shorter, may still fit.
        (run_dir / LOGS).mkdir(exist_ok=True)
        durable.write_text(run_dir / LOGS / ERROR_LOG, text, lasting=False)
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
        return write_summary(run_dir, INTERRUPTED, error="interrupted")
    if type(error).__name__ == _RUN_ENDED:
        reason = "Flower has ended the run: by flwr stop, or because its SuperLink was started anew"
        return write_summary(run_dir, INTERRUPTED, error=reason)
    # Flower's client imports this module, and never the planner.
    from strategies.planning.planner import InfeasibleRound

    mistake = isinstance(error, ValueError | FileNotFoundError)
    status = INFEASIBLE if isinstance(error, InfeasibleRound) else BAD_INPUT if mistake else FAILED
    return write_summary(run_dir, status, error=error_text(error, run_dir / LOGS / ERROR_LOG))


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read how the run ended; None while it has not.

    Raises
    ------
    ValueError
        If the file is no JSON object; the message names it.
    """
    try:
        return _object(run_dir / SUMMARY, (run_dir / SUMMARY).read_bytes())
    except FileNotFoundError:
        return None


def _object(path: Path, data: bytes) -> dict[str, Any]:
    """Parse a JSON object of a run's file."""
    try:
        value = json_value(data)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, found {data[:60]!r}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {data[:60]!r}")
    return value


def _json(value: Any, indent: int | None = None) -> str:
    # A loss that is not a number is null: NaN is no JSON, and strict readers refuse the whole line.
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
