"""The runs of a folder at a glance: when, how they ended, their metric, and what they take on the disk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from flower_app.runs.run_directory import CONFIG, LATEST, read_rounds, read_run_config, read_summary
from flower_app.runs.run_lock import is_served

_MEGA = 1e6


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run directory."""

    name: str
    status: str
    """As in its summary; ``running``, or ``stopped`` where it was killed."""
    task: str
    rounds: int
    """Rounds that are done."""
    num_rounds: int
    metric: str
    """Name of the task's metric on the test set; else of the last evaluation; empty without any."""
    value: float | None
    metric_round: int | None
    """Round of the model that it is of."""
    size: int
    """Of all files [byte]."""
    modified: float
    """When it was written to last [s since 1970]."""


def listed_runs(runs_dir: Path) -> list[ListedRun]:
    """Read the runs of a folder, the newest first.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    """
    if not runs_dir.is_dir():
        raise FileNotFoundError(f"--runs-dir: no folder {runs_dir.absolute()}; collapipe run makes one")
    folders = [path for path in runs_dir.iterdir() if path.name != LATEST and (path / CONFIG).is_file()]
    return sorted(map(_listed, folders), key=lambda run: run.modified, reverse=True)


def _listed(run_dir: Path) -> ListedRun:
    config, rounds, summary = read_run_config(run_dir), read_rounds(run_dir)[0], read_summary(run_dir)
    status = str(summary["status"]) if summary else "running" if is_served(run_dir) else "stopped"
    end = summary or {}
    metrics, round_ = dict(end.get("metrics") or {}), end.get("scored_round", end.get("rounds"))
    if not metrics:
        evaluated = next((line for line in reversed(rounds) if line.get("metrics")), None)
        metrics, round_ = (dict(evaluated["metrics"]), evaluated["round"]) if evaluated else ({}, None)
    metric = next((name for name in metrics if name != "loss"), next(iter(metrics), ""))
    files = [path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    return ListedRun(
        name=run_dir.name,
        status=status,
        task=config.task.name,
        rounds=int(rounds[-1]["round"]) if rounds else 0,
        num_rounds=config.num_rounds,
        metric=metric,
        value=metrics.get(metric),
        metric_round=round_,
        size=sum(path.stat().st_size for path in files),
        modified=max((path.stat().st_mtime for path in files), default=0.0),
    )


def runs_table(runs: list[ListedRun]) -> Table:
    """Show runs as a table."""
    table = Table("run", "status", "task", "rounds", "metric", "MB", "written", box=None, pad_edge=False)
    for run in runs:
        table.add_row(run.name, run.status, run.task, f"{run.rounds}/{run.num_rounds}", *_cells(run))
    return table


def _cells(run: ListedRun) -> tuple[str, str, str]:
    value: Any = run.value
    known = isinstance(value, int | float)
    metric = f"{run.metric} {value:.4g} (round {run.metric_round})" if known else "-"
    return metric, f"{run.size / _MEGA:.1f}", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified))
