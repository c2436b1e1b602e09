"""Live progress of a run, read from what the run writes. All of it goes to standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from flower_app.plain_console import PlainConsole
from flower_app.runs.run_directory import Wait, read_rounds, read_waiting

_RECENT = 10
"""Rounds over which the time of one is averaged."""
_EVALUATIONS = 8
"""Evaluations that the closing table shows at most."""
_LONG_S = 5.0
"""A wait that was shorter is not told of again when it ends [s]."""
_QUIET_S = 1.0
"""Least time between two lines that tell nothing but the loss [s]."""


class RunProgress:
    """Follows ``rounds.jsonl``: a bar on a terminal, else a line a round, or fewer where rounds are very short.

    Parameters
    ----------
    run_dir : the run directory
    num_rounds : of the whole run
    console : standard error if None
    quiet : show nothing
    """

    def __init__(self, run_dir: Path, num_rounds: int, console: Console | None = None, *, quiet: bool = False) -> None:
        self.run_dir = run_dir
        self.num_rounds = num_rounds
        self.console = console or PlainConsole(stderr=True, quiet=quiet)
        self.rounds: list[dict[str, Any]] = []
        self._offset = 0
        self._spoke = -math.inf
        self._bar: Progress | None = None
        self._task = TaskID(0)
        """Of the bar: its one line."""
        self._waits: dict[str, Wait] = {}
        """Whom the round waits for, by cluster, as it was shown last."""

    def __enter__(self) -> RunProgress:
        """Show the bar where there is a terminal."""
        if self.console.is_terminal:
            columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn())
            self._bar = Progress(
                *columns, TextColumn("{task.description}", markup=False), console=self.console, transient=True
            )
            self._task = self._bar.add_task("starting", total=self.num_rounds)
            self._bar.start()
        else:
            self.console.print("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Read the rounds that were added, and show them."""
        new_records, self._offset = read_rounds(self.run_dir, self._offset)
        for record in new_records:
            self.rounds.append(record)
            telling = record.get("metrics") or record.get("failed") or record["round"] in (1, self.num_rounds)
            if self._bar is None and (telling or time.monotonic() - self._spoke >= _QUIET_S):
                self._spoke = time.monotonic()
                self.console.print(f"round {record['round']}/{self.num_rounds}  {self.status()}", soft_wrap=True)
        if new_records and self._bar is not None:
            self._bar.update(self._task, completed=int(new_records[-1]["round"]), description=self.status())
        self._show_waits()

    def _show_waits(self) -> None:
        """Say whom the round waits for and why whenever that changes, and how long it was."""
        waits = read_waiting(self.run_dir)
        if waits == self._waits:
            return
        for cluster, wait in waits.items():
            if cluster not in self._waits or self._waits[cluster].reason != wait.reason:
                self._print(f"waiting for cluster {cluster}: {wait.reason}")
        for cluster in self._waits.keys() - waits.keys():
            waited_s = time.time() - self._waits[cluster].since
            if waited_s >= _LONG_S:
                self._print(f"waited {waited_s:.0f} s for cluster {cluster}")
        self._waits = waits

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def status(self) -> str:
        """Loss of the last round, metrics of the last evaluation, failures, time left."""
        last_record = self.rounds[-1]
        words = [f"loss {_number(last_record.get('train_loss'))}"]
        evaluated = next((record for record in reversed(self.rounds) if record.get("metrics")), None)
        if evaluated is not None:
            words += [f"{name} {_number(value)}" for name, value in _scores(evaluated["metrics"]).items()]
        if last_record.get("failed"):
            words.append(f"{len(last_record['failed'])} clusters failed")
        left = self.seconds_left()
        return "  ".join([*words, f"{_clock(left)} left"] if left else words)

    def seconds_left(self) -> float:
        """Expected time to the end of the last round [s], from the recent rounds."""
        recent = [float(record["round_s"]) for record in self.rounds[1:][-_RECENT:] if record.get("round_s")]
        if not recent:
            # Only the first is known, in which everything is set up.
            return 0.0
        return sum(recent) / len(recent) * (self.num_rounds - int(self.rounds[-1]["round"]))

    def report(self, summary: Mapping[str, Any]) -> None:
        """Show how the evaluations went, the result, and where it lies."""
        evaluated = [record for record in self.rounds if record.get("metrics")]
        if len(evaluated) > _EVALUATIONS:
            step = math.ceil(len(evaluated) / _EVALUATIONS)
            # Counted from the end, so that the last stays.
            evaluated = evaluated[::-1][::step][::-1]
        if evaluated:
            names = list(evaluated[-1]["metrics"])
            table = Table("round", "train loss", *names, box=None, pad_edge=False)
            for record in evaluated:
                values = [_number(record["metrics"].get(name)) for name in names]
                table.add_row(str(record["round"]), _number(record.get("train_loss")), *values)
            self.console.print(table)
        scores = "  ".join(f"{name} {_number(value)}" for name, value in summary.get("metrics", {}).items())
        self.console.print(f"test: {scores or 'not scored'}  ({_clock(float(summary.get('wall_s') or 0.0))})")
        self.console.print(f"run: {self.run_dir}", soft_wrap=True)


def _scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "loss"} or dict(metrics)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
