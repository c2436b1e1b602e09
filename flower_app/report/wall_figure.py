"""The report's figure of the wall clock: what this machine's seconds went to, and when something was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flower_app.report.data import FloatArray, RunData
from flower_app.report.drawing import (
    HEIGHT,
    add_legend,
    curve_look,
    draw_bars,
    known_mean,
    label_rounds,
    need_values,
    new_figure,
    panel_text,
    stack_parts,
)
from flower_app.report.round_parts import round_parts


def wall_parts(run: RunData) -> dict[str, FloatArray]:
    """Wall seconds of each round by what they went to, (R,) each; NaN where a round does not tell."""
    names = ("local steps", "weights to and from devices", "messages and waiting", "server")
    rows = np.array([round_parts(record) for record in run.rounds]).reshape(len(run.rounds), len(names))
    return {name: rows[:, i] for i, name in enumerate(names)}


def draw_wall(runs: Sequence[RunData]) -> Figure:
    """Wall seconds of the rounds by parts, and the faults at their wall time."""
    need_values([run.series("round_s") for run in runs], "no round has its wall seconds")
    figure, axes = new_figure(1, 2, HEIGHT + 0.4)
    parts = [wall_parts(run) for run in runs]
    if len(runs) == 1:
        stack_parts(axes[0, 0], runs[0], parts[0])
        label_rounds(axes[0, 0], runs, "wall time of a round [s]")
    else:
        means = [{name: known_mean(values) for name, values in part.items()} for part in parts]
        draw_bars(axes[0, 0], runs, means, "mean wall time of a round [s]")
    axis, rows = axes[0, 1], 0
    for run in runs:
        rows += _faults(axis, run, rows, run.label if len(runs) > 1 else "")
    if rows:
        axis.set_xlabel("wall time [s]")
        axis.set_ylim(rows - 0.5, -0.5)
        axis.set_xlim(left=0)
    else:
        panel_text(axis, "no fault was recorded")
    add_legend(figure)
    return figure


def _faults(axis: Any, run: RunData, first: int, prefix: str) -> int:
    """Marks of a run's faults, a row for each kind; returns how many rows there are."""
    times: dict[str, list[float]] = {}
    ends = np.nan_to_num(run.series("wall_s"))
    for record, end in zip(run.rounds, ends, strict=True):
        for fault in record.get("faults") or ():
            times.setdefault(str(fault.get("kind")), []).append(float(end))
    ticks = [*axis.get_yticks()] if first else []
    labels = [label.get_text() for label in axis.get_yticklabels()] if first else []
    for row, (kind, marks) in enumerate(sorted(times.items()), first):
        look = curve_look(row, len(marks)) | {"linestyle": "", "markevery": 1, "markersize": 6}
        axis.plot(marks, [row] * len(marks), **look)
        ticks.append(row)
        labels.append(f"{prefix} {kind}".strip() + f" ({len(marks)})")
    if times:
        axis.set_yticks(ticks, labels)
    return len(times)
