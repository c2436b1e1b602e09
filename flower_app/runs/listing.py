"""The runs of a folder at a glance: when, how they ended, their metric, and what they take on the disk."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from flower_app.error_text import error_text
from flower_app.runs.run_directory import CONFIG, LATEST, read_rounds, read_run_config, read_summary
from flower_app.runs.run_lock import check_readable, is_served

UNREADABLE = "unreadable"
_MEGA = 1e6


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run directory."""

    name: str
    status: str
    """Status of the summary; ``running``, ``stopped`` where it was killed, or ``unreadable``."""
    size: int
    """Size of all files [byte]."""
    modified: float
    """Time of the last write [s since 1970]."""
    task: str = ""
    rounds: int = 0
    """Rounds that are done."""
    num_rounds: int = 0
    metric: str = ""
    """Name of the task's metric on the test set; else of the last evaluation; empty without any."""
    value: float | None = None
    metric_round: int | None = None
    """Round of the model that it is of."""
    reason: str = ""
    """Reason why it is unreadable."""


def listed_runs(runs_dir: Path) -> list[ListedRun]:
    """Read the runs of a folder, the newest first; one that cannot be read does not hide the others.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    """
    if not runs_dir.is_dir():
        raise FileNotFoundError(f"--runs-dir: no folder {runs_dir.absolute()}; collapipe run makes one")
    folders = [path for path in runs_dir.iterdir() if path.name != LATEST and os.path.isfile(path / CONFIG)]
    return sorted(map(_listed, folders), key=lambda run: run.modified, reverse=True)


def _listed(run_dir: Path) -> ListedRun:
    files = list(_files(run_dir))
    size = sum(file.st_size for file in files)
    modified = max((file.st_mtime for file in files), default=0.0)
    try:
        return ListedRun(name=run_dir.name, size=size, modified=modified, **_contents(run_dir))
    except (ValueError, OSError, LookupError, TypeError) as error:
        # Of another release, or damaged.
        reason = error_text(error)
        return ListedRun(name=run_dir.name, status=UNREADABLE, size=size, modified=modified, reason=reason)


def _files(run_dir: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(run_dir):
        for name in names:
            try:
                file = os.lstat(os.path.join(folder, name))
            except OSError:
                # What a run that goes on writes aside has its name for a moment.
                continue
            if stat.S_ISREG(file.st_mode):
                yield file


def _contents(run_dir: Path) -> dict[str, Any]:
    check_readable(run_dir)
    config, rounds, summary = read_run_config(run_dir), read_rounds(run_dir)[0], read_summary(run_dir)
    status = str(summary["status"]) if summary else "running" if is_served(run_dir) else "stopped"
    end = summary or {}
    metrics, round_ = dict(end.get("metrics") or {}), end.get("scored_round", end.get("rounds"))
    if not metrics:
        evaluated = next((line for line in reversed(rounds) if line.get("metrics")), None)
        metrics, round_ = (dict(evaluated["metrics"]), evaluated["round"]) if evaluated else ({}, None)
    metric = next((name for name in metrics if name != "loss"), next(iter(metrics), ""))
    return {
        "status": status,
        "task": config.task.name,
        "rounds": int(rounds[-1]["round"]) if rounds else 0,
        "num_rounds": config.num_rounds,
        "metric": metric,
        "value": metrics.get(metric),
        "metric_round": round_,
    }


def runs_table(runs: list[ListedRun]) -> Table:
    """Show runs as a table."""
    table = Table("run", "status", "task", "rounds", "metric", "MB", "written", box=None, pad_edge=False)
    for run in runs:
        rounds = "-" if run.status == UNREADABLE else f"{run.rounds}/{run.num_rounds}"
        is_known = isinstance(run.value, int | float)
        metric = f"{run.metric} {run.value:.4g} (round {run.metric_round})" if is_known else "-"
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified))
        table.add_row(run.name, run.status, run.task or "-", rounds, metric, f"{run.size / _MEGA:.1f}", written)
    return table
