"""View of a run on a terminal: four lines that stay below the messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_ROUNDS = _BAR_CHARACTERS = 24
_RECENT = 10
_MOST_CLUSTERS = 12


def clusters_text(record: Mapping[str, Any]) -> str:
    """Name the clusters of a round's line by what they did; those without a plan, or not selected, wait."""

    def listed(clusters: Sequence[int]) -> str:
        if len(clusters) > _MOST_CLUSTERS:
            return f"{len(clusters)} of them"
        return ", ".join(map(str, clusters))

    trained = sorted(int(report["cluster"]) for report in record.get("clusters") or ())
    failed = sorted(int(one["cluster"]) for one in record.get("failed") or () if one.get("cluster") is not None)
    planned = {int(one["cluster"]) for one in (record.get("virtual") or {}).get("clusters") or ()}
    parts = ((trained, "train"), (sorted(planned - {*trained, *failed}), "wait"), (failed, "failed"))
    return " · ".join(f"{listed(clusters)} {word}" for clusters, word in parts if clusters)


def loss_curve(values: Sequence[float | None]) -> str:
    """Draw the newest values as blocks of eight heights, the largest on top; nothing for fewer than two."""
    recent = [value for value in values if isinstance(value, int | float) and abs(value) < float("inf")]
    recent = recent[-_CURVE_ROUNDS:]
    if len(recent) < 2:
        return ""
    low, high = min(recent), max(recent)
    height = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * height)] for value in recent)


def clock_text(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds; hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def round_rate(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return the seconds of a recent round and its targets a second; empty before the second round."""
    recent = [record for record in rounds[1:][-_RECENT:] if record.get("round_s")]
    seconds = sum(float(record["round_s"]) for record in recent)
    if not recent or seconds <= 0:
        return ""
    # Of a translation the words of the target, of a classification the examples: what the loss is a mean over.
    targets = sum(float(record.get("weight") or 0.0) for record in recent)
    per_second = f", {targets / seconds:.3g} targets/s" if targets else ""
    return f"{seconds / len(recent):.3g} s a round{per_second}"


class TerminalView:
    """Lines of a run, as rich draws them; :class:`RunProgress` changes their content."""

    def __init__(self, num_rounds: int, completed: int = 0) -> None:
        self._began = time.monotonic()
        self._num_rounds, self._completed = num_rounds, completed
        self.doing = ""
        """Before the first round: what the start-up does."""
        self.newest_fault = ""
        self._rounds: Sequence[Mapping[str, Any]] = ()
        self._status, self._left, self._faults = "", "", 0

    def show(self, rounds: Sequence[Mapping[str, Any]], status: str, left: str) -> None:
        """Show another round."""
        self._rounds, self._status, self._left = rounds, status, left
        self._faults = sum(len(record.get("faults") or ()) for record in rounds)

    def __rich__(self) -> RenderableType:
        """The lines at this moment; rich asks for them several times a second."""
        done = int(self._rounds[-1]["round"]) if self._rounds else self._completed
        grid = Table.grid(padding=(0, 1))
        gone = clock_text(time.monotonic() - self._began)
        times = f"{gone} gone, {self._left} left" if self._left else f"{gone} gone"
        bar = ProgressBar(total=max(self._num_rounds, 1), completed=done, width=_BAR_CHARACTERS)
        grid.add_row(f"round {done}/{self._num_rounds}", bar, times)
        if not self._rounds:
            return Group(grid, _line(f"starting: {self.doing}"))
        drawn = loss_curve([record.get("train_loss") for record in self._rounds])
        lines = [_line(" ".join(filter(None, (self._status, drawn)))), _line(round_rate(self._rounds))]
        lines.append(_line(f"clusters: {clusters_text(self._rounds[-1])}"))
        if self._faults or self.newest_fault:
            lines.append(_line(f"faults: {self._faults}; newest: {self.newest_fault}"))
        return Group(grid, *(line for line in lines if line.plain))


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
