"""The report's figures of clusters and devices: queues, who trained, energy, memory.

Up to some number each cluster is shown; of more, what they have together, and those with the most and the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flower_app.report.data import FloatArray, NoData, RunData, extremes
from flower_app.report.drawing import (
    DARK,
    HEIGHT,
    MIDDLE,
    add_legend,
    byte_unit,
    curve_look,
    draw_bars,
    label_rounds,
    make_logarithmic,
    need_values,
    new_figure,
    plot_curve,
    plot_runs,
    stack_parts,
    window_means,
    window_of,
)
from flower_app.report.timeline_figure import add_boxes

_MANY = 24
"""Clusters that are drawn one by one; of more, ranges, and those with the most and the least."""
_SHOWN = 16
"""Most clusters or devices in a figure: those with the most and the least."""
_STATES: dict[str, dict[str, Any]] = {
    "selected": {"facecolor": DARK, "edgecolor": DARK, "linewidth": 0.1},
    "not selected": {"facecolor": "#eeeeee", "edgecolor": "#bbbbbb", "linewidth": 0.1},
    "left out": {"facecolor": "#f6c667", "edgecolor": "#7a4b00", "linewidth": 0.4, "hatch": "////"},
    "failed": {"facecolor": "#ffffff", "edgecolor": "#b00020", "linewidth": 0.8, "hatch": "xxxx"},
}


def draw_queues(runs: Sequence[RunData]) -> Figure:
    """Virtual queues, and the convergence bound beside its limit."""
    need_values([run.over_clusters("gamma", "mean") for run in runs], "no round has the convergence bound Γ")
    figure, axes = new_figure(1, 2, HEIGHT + 0.4)
    queue_axes, bound_axes = axes[0]
    if len(runs) == 1 and len(runs[0].cluster_numbers) > _MANY:
        _spread(queue_axes, runs[0], "queue")
        _spread(bound_axes, runs[0], "gamma")
        label_rounds(queue_axes, runs, "virtual queue Y")
        label_rounds(bound_axes, runs, "bound Γ")
    elif len(runs) == 1:
        run = runs[0]
        for i, n in enumerate(run.cluster_numbers):
            label = run.cluster_label(n) if len(run.cluster_numbers) <= 10 else None
            for axis, key in ((queue_axes, "queue"), (bound_axes, "gamma")):
                values = run.cluster_series(key)[i]
                plot_curve(axis, run, values, i, label)
        label_rounds(queue_axes, runs, "virtual queue Y of each cluster")
        label_rounds(bound_axes, runs, "bound Γ of each cluster")
    else:
        plot_runs(queue_axes, runs, lambda run: run.over_clusters("queue", "max"), "largest virtual queue Y")
        plot_runs(bound_axes, runs, lambda run: run.over_clusters("gamma", "mean"), "bound Γ, mean over clusters")
    limits = {value for run in runs if np.isfinite(value := _last(run.series("virtual", "gamma_max")))}
    for value in sorted(limits):
        bound_axes.axhline(value, color="black", linewidth=1.6, linestyle=(0, (8, 3)), label=f"Γmax = {value:.4g}")
    add_legend(figure)
    return figure


def _spread(axis: Axes, run: RunData, key: str) -> None:
    """Draw the sum over many clusters, and the largest cluster."""
    values = run.cluster_series(key)
    width = window_of(run)
    means = np.array([window_means(row, width) for row in values])
    rounds = window_means(run.numbers, width)
    known = np.isfinite(means).any(axis=0)
    low, lower, middle, upper, high = np.full((5, len(rounds)), np.nan)
    if known.any():
        quantiles = np.nanquantile(means[:, known], [0.0, 0.1, 0.5, 0.9, 1.0], axis=0)
        low[known], lower[known], middle[known], upper[known], high[known] = quantiles
    axis.fill_between(rounds, low, high, color="#dce8f3", linewidth=0, label="all clusters")
    axis.fill_between(rounds, lower, upper, color="#9fc3e3", linewidth=0, label="80 % of them")
    axis.plot(rounds, middle, **curve_look(0, len(rounds), markers=False), label="median")
    largest = np.where(np.isfinite(means), means, -np.inf).max(axis=1)
    worst = int(np.argmax(largest))
    label = f"largest {'queue' if key == 'queue' else 'bound'}: {run.cluster_label(run.cluster_numbers[worst])}"
    axis.plot(rounds, means[worst], **curve_look(1, len(rounds), markers=False), label=label)


def draw_selection(runs: Sequence[RunData]) -> Figure:
    """State of each cluster in each round."""
    runs_with_clusters = [run for run in runs if run.cluster_numbers]
    if not runs_with_clusters:
        raise NoData("no round has data on its clusters")
    heights = [max(0.9, min(0.28 * len(run.cluster_numbers), 6.0)) for run in runs_with_clusters]
    figure, axes = new_figure(
        len(runs_with_clusters), 1, sum(heights) + 0.75 * len(runs_with_clusters) + 0.4, heights=heights
    )
    for axis, run in zip(axes[:, 0], runs_with_clusters, strict=True):
        _raster(axis, run)
        if len(runs) > 1:
            axis.set_title(run.label, fontsize=9, loc="left")
    add_legend(figure)
    return figure


def _raster(axis: Axes, run: RunData) -> None:
    """Spans of equal states; hatches and lightness tell them apart."""
    states, numbers = run.states(), run.numbers
    rows = len(run.cluster_numbers)
    if rows > _MANY:
        _image(axis, states, numbers)
    else:
        for state, look in _STATES.items():
            boxes = [(*span, row - 0.4, 0.8) for row in range(rows) for span in _spans(states[row] == state, numbers)]
            add_boxes(axis, boxes, label=state, **look)
    shares = np.mean(states == "selected", axis=1)
    step = max(1, rows // 24)
    axis.set_yticks(range(0, rows, step), [run.cluster_label(n) for n in run.cluster_numbers[::step]])
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(0, rows, step), [f"{100 * share:.0f} %" for share in shares[::step]])
    right.tick_params(length=0)
    axis.set_ylim(rows - 0.5, -0.5)
    axis.grid(False)
    axis.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def _image(axis: Axes, states: NDArray[np.str_], numbers: FloatArray) -> None:
    """Many clusters as one picture, of a size that does not grow with rounds and clusters."""
    colours = ListedColormap([look["facecolor"] for look in _STATES.values()])
    places = np.select([states == state for state in _STATES], range(len(_STATES)))
    axis.imshow(
        places,
        cmap=colours,
        vmin=-0.5,
        vmax=len(_STATES) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(numbers[0] - 0.5, numbers[-1] + 0.5, len(states) - 0.5, -0.5),
    )
    for state, look in _STATES.items():
        if np.any(states == state):
            axis.add_patch(
                Rectangle((0, 0), 0, 0, label=state, facecolor=look["facecolor"], edgecolor=look["edgecolor"])
            )


def draw_energy(runs: Sequence[RunData]) -> Figure:
    """Energy of the rounds, and in total."""
    # Of each cluster and round, (N, R) each [J].
    keys = {"devices": "device_energy_j", "uploads": "uplink_energy_j"}
    parts = [{name: run.cluster_series(key) for name, key in keys.items()} for run in runs]
    need_values([part["devices"] for part in parts], "no round has an energy")
    figure, axes = new_figure(1, 2, HEIGHT + 0.3)
    if len(runs) == 1:
        run = runs[0]
        stack_parts(axes[0, 0], run, {name: np.nansum(values, axis=0) for name, values in parts[0].items()})
        label_rounds(axes[0, 0], runs, "energy of a round [J]")
        joules = {name: np.nansum(values, axis=1) for name, values in parts[0].items()}
        most = _MANY if len(run.cluster_numbers) <= _MANY else _SHOWN
        places, some = extremes(sum(joules.values(), np.zeros(len(run.cluster_numbers))), most)
        totals = [{name: float(values[i]) for name, values in joules.items()} for i in places]
        numbers = [run.cluster_numbers[i] for i in places]
        ticks = [f"{n} {run.names[n]}" if n in run.names else f"{n}" for n in numbers]
        draw_bars(axes[0, 1], ticks, totals, "energy of the whole run [J]")
        axes[0, 1].set_xlabel(f"cluster{_left_away(some, len(run.cluster_numbers))}")
    else:
        plot_runs(axes[0, 0], runs, lambda run: run.series("virtual", "energy_j"), "energy of a round [J]")
        totals = [{name: float(np.nansum(values)) for name, values in part.items()} for part in parts]
        draw_bars(axes[0, 1], runs, totals, "energy of the whole run [J]")
    add_legend(figure)
    return figure


def draw_memory(runs: Sequence[RunData]) -> Figure:
    """Memory of the devices, modelled and measured."""
    memory_by_run = [run.memory() for run in runs]
    if not any(memory_by_run):
        raise NoData("no round has a device's modelled or measured memory")
    if len(runs) == 1:
        devices = sorted(memory_by_run[0])
        places, some = extremes(np.array([np.nanmax(memory_by_run[0][device]) for device in devices]), 2 * _MANY)
        labels = [f"{n}.{k}" for n, k in (devices[i] for i in places)]
        where = f"cluster.device{_left_away(some, len(devices))}"
        pairs, whole_model_bytes = [memory_by_run[0][devices[i]] for i in places], [runs[0].whole_model_bytes()]
    else:
        largest = [np.array([*memory.values(), (np.nan, np.nan)]) for memory in memory_by_run]
        pairs = [(float(np.fmax.reduce(pair[:, 0])), float(np.fmax.reduce(pair[:, 1]))) for pair in largest]
        labels, whole_model_bytes = [run.label for run in runs], [run.whole_model_bytes() for run in runs]
        where = "run: its largest device"
    values = np.array([pair for pair in pairs] + [(w, np.nan) for w in whole_model_bytes])
    divisor, unit = byte_unit(values)
    figure, axes = new_figure(1, 1, HEIGHT + 0.4)
    axis, x = axes[0, 0], np.arange(len(pairs))
    data = np.array(pairs) / divisor
    axis.bar(x - 0.2, data[:, 0], 0.4, color=MIDDLE, edgecolor="black", linewidth=0.5, label="modelled")
    axis.bar(x + 0.2, data[:, 1], 0.4, color="white", edgecolor="black", linewidth=0.5, hatch="////",
             label="measured peak above an idle process")  # fmt: skip
    bounds = [(-0.5, len(pairs) - 0.5)] if len(runs) == 1 else [(i - 0.45, i + 0.45) for i in range(len(runs))]
    for i, ((low, high), value) in enumerate(zip(bounds, whole_model_bytes, strict=True)):
        if np.isfinite(value):
            label = None if i else "whole model on one device, modelled"
            axis.hlines(value / divisor, low, high, color="black", linestyle="--", linewidth=1.6, label=label)
    step = max(1, len(pairs) // 50)
    axis.set_xticks(x[::step], labels[::step], rotation=90 if len(labels) > 16 else 0)
    axis.set_xlabel(where)
    axis.set_ylabel(f"memory [{unit}]")
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() > 20 * positive.min():
        make_logarithmic(axis)
    add_legend(figure)
    return figure


def _left_away(some: bool, number: int) -> str:
    return f": of {number:,} those with the most and the least" if some else ""


def _spans(chosen: NDArray[np.bool_], numbers: FloatArray) -> list[tuple[float, float]]:
    """Start and length of each stretch of consecutive rounds."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    return [(float(numbers[a]) - 0.5, float(numbers[b - 1] - numbers[a]) + 1.0) for a, b in edges.reshape(-1, 2)]


def _last(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")
