"""The report's figures of whole rounds, of one or several runs: loss, latency, bytes and wall clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flower_app.report.data import RunData
from flower_app.report.drawing import (
    HEIGHT,
    add_legend,
    byte_unit,
    curve_look,
    draw_bars,
    known_mean,
    label_rounds,
    make_logarithmic,
    need_values,
    new_figure,
    panel_text,
    plot_curve,
    plot_runs,
    stack_parts,
)
from flower_app.report.round_parts import round_parts


def draw_loss(runs: Sequence[RunData]) -> Figure:
    """Training loss and metric, over rounds and over virtual time."""
    losses = [run.series("train_loss") for run in runs]
    need_values(losses, "no round has a training loss")
    metric = next((name for run in runs if (name := run.metric())), None)
    times = [np.nancumsum(run.series("virtual", "latency_s")) for run in runs]
    timed = any(np.any(t > 0) for t in times)
    figure, axes = new_figure(2, 2, 2 * HEIGHT, sharey="row")
    for i, run in enumerate(runs):
        label = run.label if len(runs) > 1 else "training"
        scores = run.series("metrics", metric) if metric else np.array([])
        held_out = run.series("metrics", "loss")
        for column, x in enumerate((run.numbers, times[i])):
            if column and not np.any(x > 0):
                continue
            axes[0, column].plot(x, losses[i], **curve_look(i, len(x), markers=len(runs) > 1), label=label)
            if len(runs) == 1 and np.any(np.isfinite(held_out)):
                is_known = np.isfinite(held_out)
                axes[0, column].plot(x[is_known], held_out[is_known], **curve_look(1, 1), label="validation")
            is_known = np.isfinite(scores)
            if np.any(is_known):
                axes[1, column].plot(x[is_known], scores[is_known], **curve_look(i, 1), label=label)
    axes[0, 0].set_ylabel("loss [nat]")
    axes[1, 0].set_ylabel(f"{metric or 'metric'}, validation")
    for column, unit in enumerate(("round", "cumulated virtual time [s]")):
        axes[0 if metric is None else 1, column].set_xlabel(unit)
        if column and not timed:
            panel_text(axes[0, 1], "no data: no round has a virtual latency")
            panel_text(axes[1, 1], "no data: no round has a virtual latency")
        elif metric is None:
            panel_text(axes[1, column], "no data: no round was evaluated")
        else:
            axes[1, column].set_xlim(axes[0, column].get_xlim())
    add_legend(figure)
    return figure


def draw_latency(runs: Sequence[RunData]) -> Figure:
    """Latency of the rounds and its parts."""
    need_values([run.series("virtual", "latency_s") for run in runs], "no round has a virtual latency")
    if len(runs) == 1:
        run = runs[0]
        predicted, measured = run.predictions()
        compared = bool(np.any(np.isfinite(measured)))
        figure, axes = new_figure(1, 1 + compared, HEIGHT + 0.6)
        stack_parts(axes[0, 0], run, run.slowest_parts())
        eq15, waiting = run.series("virtual", "latency_eq15_s"), run.over_clusters("waiting_s", "mean")
        plot_curve(axes[0, 0], run, eq15, 2, "latency by Eq. (15)", color="black", marker="")
        plot_curve(axes[0, 0], run, waiting, 1, "mean waiting", color="black")
        label_rounds(axes[0, 0], runs, "virtual time [s]")
        if compared:
            plot_curve(axes[0, 1], run, predicted, 3, "predicted local steps")
            plot_curve(axes[0, 1], run, measured, 4, "measured local steps")
            label_rounds(axes[0, 1], runs, "slowest cluster [s]")
        add_legend(figure)
        return figure
    figure, axes = new_figure(1, 2, HEIGHT + 0.4)
    plot_runs(axes[0, 0], runs, lambda run: run.series("virtual", "latency_s"), "latency of a round [s]")
    parts = [{name: known_mean(values) for name, values in run.slowest_parts().items()} for run in runs]
    means = [known_mean(run.over_clusters("waiting_s", "mean")) for run in runs]
    draw_bars(axes[0, 1], runs, parts, "mean of a round [s]")
    axes[0, 1].plot(range(len(runs)), means, "D", color="black", markeredgecolor="white", label="mean waiting")
    add_legend(figure)
    return figure


def draw_bytes(runs: Sequence[RunData]) -> Figure:
    """Bytes of messages and of the links between devices."""
    kinds = ("messages down", "messages up", "device links, modelled")
    bytes_by_run = [dict(zip(kinds, (run.series("bytes_down"), run.series("bytes_up"), run.link_bytes()), strict=True))
             for run in runs]  # fmt: skip
    need_values([values for kind in bytes_by_run for values in kind.values()], "no round has counted bytes")
    divisor, unit = byte_unit(np.concatenate([values for kind in bytes_by_run for values in kind.values()]))
    figure, axes = new_figure(1, 1 if len(runs) == 1 else 3, HEIGHT + 0.2, sharey=True)
    for column, kind in enumerate(kinds):
        axis = axes[0, 0] if len(runs) == 1 else axes[0, column]
        for i, run in enumerate(runs):
            label, look = (kind, column) if len(runs) == 1 else (run.label, i)
            if np.any(np.isfinite(bytes_by_run[i][kind])):
                plot_curve(axis, run, bytes_by_run[i][kind] / divisor, look, label)
        if len(runs) > 1:
            axis.set_title(kind, fontsize=9)
        label_rounds(axis, runs, f"bytes of a round [{unit}]" if axis is axes[0, 0] else "")
    numbers = np.concatenate([values[values > 0] for kind in bytes_by_run for values in kind.values()])
    if len(numbers) and numbers.max() > 20 * numbers.min():
        make_logarithmic(axes[0, 0])
    else:
        axes[0, 0].set_ylim(bottom=0)
    add_legend(figure)
    return figure


def draw_wall(runs: Sequence[RunData]) -> Figure:
    """Wall seconds of the rounds by parts, and the faults at their wall time."""
    need_values([run.series("round_s") for run in runs], "no round has its wall seconds")
    figure, axes = new_figure(1, 2, HEIGHT + 0.4)
    names = ("local steps", "weights to and from devices", "messages and waiting", "server")
    # Of each round, (R,) each; NaN where a round does not tell.
    rows_by_run = [np.array([round_parts(record) for record in run.rounds]).reshape(-1, len(names)) for run in runs]
    parts = [{name: rows[:, i] for i, name in enumerate(names)} for rows in rows_by_run]
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
