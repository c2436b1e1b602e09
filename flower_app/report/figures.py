"""The report's figures: each takes one or several runs and draws them, or raises :class:`NoData`.

They are read in black and white too: curves differ by line style and marker, areas by lightness and hatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from flower_app.report.data import FloatArray, NoData, RunData
from flower_app.report.timeline_figure import add_boxes

_WIDTH = 9.6
"""Of a figure [inch]."""
_HEIGHT = 3.1
_MOST = 250
"""Points of a curve over the rounds; those of a longer run are means."""
_COLOURS = ("#0b559f", "#d55e00", "#2a8a62", "#8e4a96", "#7a6a00", "#4d4d4d", "#c2185b", "#0097a7")
_LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")
_DARK, _MIDDLE = "#1f4e79", "#6fa8d6"
_STATES: dict[str, dict[str, Any]] = {
    "selected": {"facecolor": _DARK, "edgecolor": _DARK, "linewidth": 0.1},
    "not selected": {"facecolor": "#eeeeee", "edgecolor": "#bbbbbb", "linewidth": 0.1},
    "left out": {"facecolor": "#f6c667", "edgecolor": "#7a4b00", "linewidth": 0.4, "hatch": "////"},
    "failed": {"facecolor": "#ffffff", "edgecolor": "#b00020", "linewidth": 0.8, "hatch": "xxxx"},
}


def draw_loss(runs: Sequence[RunData]) -> Figure:
    """Training loss and metric, over rounds and over virtual time."""
    losses = [run.series("train_loss") for run in runs]
    _need(losses, "no round has a training loss")
    metric = next((name for run in runs if (name := run.metric())), None)
    times = [np.nancumsum(run.series("virtual", "latency_s")) for run in runs]
    timed = any(np.any(t > 0) for t in times)
    figure, axes = _grid(2, 2, 2 * _HEIGHT, sharey="row")
    for i, run in enumerate(runs):
        label = run.label if len(runs) > 1 else "training"
        scores = run.series("metrics", metric) if metric else np.array([])
        held_out = run.series("metrics", "loss")
        for column, x in enumerate((run.numbers, times[i])):
            if column and not np.any(x > 0):
                continue
            axes[0, column].plot(x, losses[i], **_curve(i, len(x), markers=len(runs) > 1), label=label)
            if len(runs) == 1 and np.any(np.isfinite(held_out)):
                is_known = np.isfinite(held_out)
                axes[0, column].plot(x[is_known], held_out[is_known], **_curve(1, 1), label="validation")
            is_known = np.isfinite(scores)
            if np.any(is_known):
                axes[1, column].plot(x[is_known], scores[is_known], **_curve(i, 1), label=label)
    axes[0, 0].set_ylabel("loss [nat]")
    axes[1, 0].set_ylabel(f"{metric or 'metric'}, validation")
    for column, unit in enumerate(("round", "cumulated virtual time [s]")):
        axes[0 if metric is None else 1, column].set_xlabel(unit)
        if column and not timed:
            _blank(axes[0, 1], "no round has a virtual latency")
            _blank(axes[1, 1], "no round has a virtual latency")
        elif metric is None:
            _blank(axes[1, column], "no round was evaluated")
        else:
            axes[1, column].set_xlim(axes[0, column].get_xlim())
    _legend(figure)
    return figure


def draw_latency(runs: Sequence[RunData]) -> Figure:
    """Latency of the rounds and its parts."""
    _need([run.series("virtual", "latency_s") for run in runs], "no round has a virtual latency")
    if len(runs) == 1:
        run = runs[0]
        figure, axes = _grid(1, 1, _HEIGHT + 0.6)
        _stack(axes[0, 0], run, run.slowest_parts())
        eq15, waiting = run.series("virtual", "latency_eq15_s"), run.over_clusters("waiting_s", "mean")
        _plot(axes[0, 0], run, eq15, 2, "latency by Eq. (15)", color="black", marker="")
        _plot(axes[0, 0], run, waiting, 1, "mean waiting", color="black")
        _rounds(axes[0, 0], runs, "virtual time [s]")
        _legend(figure)
        return figure
    figure, axes = _grid(1, 2, _HEIGHT + 0.4)
    for i, run in enumerate(runs):
        latency = run.series("virtual", "latency_s")
        _plot(axes[0, 0], run, latency, i, run.label)
    _rounds(axes[0, 0], runs, "latency of a round [s]")
    parts = [{name: _mean(values) for name, values in run.slowest_parts().items()} for run in runs]
    means = [_mean(run.over_clusters("waiting_s", "mean")) for run in runs]
    _bars(axes[0, 1], runs, parts, "mean of a round [s]")
    axes[0, 1].plot(range(len(runs)), means, "D", color="black", markeredgecolor="white", label="mean waiting")
    _legend(figure)
    return figure


def draw_queues(runs: Sequence[RunData]) -> Figure:
    """Virtual queues, and the convergence bound beside its limit."""
    _need([run.over_clusters("gamma", "mean") for run in runs], "no round has the convergence bound Γ")
    figure, axes = _grid(1, 2, _HEIGHT + 0.4)
    queue_axes, bound_axes = axes[0]
    if len(runs) == 1:
        run = runs[0]
        for i, n in enumerate(run.cluster_numbers):
            label = f"cluster {n}" if len(run.cluster_numbers) <= 10 else None
            for axis, key in ((queue_axes, "queue"), (bound_axes, "gamma")):
                values = run.cluster_series(key)[i]
                _plot(axis, run, values, i, label)
        _rounds(queue_axes, runs, "virtual queue Y of each cluster")
        _rounds(bound_axes, runs, "bound Γ of each cluster")
    else:
        for i, run in enumerate(runs):
            for axis, key, of in ((queue_axes, "queue", "max"), (bound_axes, "gamma", "mean")):
                values = run.over_clusters(key, of)
                _plot(axis, run, values, i, run.label)
        _rounds(queue_axes, runs, "largest virtual queue Y")
        _rounds(bound_axes, runs, "bound Γ, mean over clusters")
    limits = {value for run in runs if np.isfinite(value := _last(run.series("virtual", "gamma_max")))}
    for value in sorted(limits):
        bound_axes.axhline(value, color="black", linewidth=1.6, linestyle=(0, (8, 3)), label=f"Γmax = {value:.4g}")
    _legend(figure)
    return figure


def draw_selection(runs: Sequence[RunData]) -> Figure:
    """State of each cluster in each round."""
    runs_with_clusters = [run for run in runs if run.cluster_numbers]
    if not runs_with_clusters:
        raise NoData("no round has data on its clusters")
    heights = [max(0.9, min(0.28 * len(run.cluster_numbers), 6.0)) for run in runs_with_clusters]
    figure, axes = _grid(
        len(runs_with_clusters), 1, sum(heights) + 0.75 * len(runs_with_clusters) + 0.4, heights=heights
    )
    for axis, run in zip(axes[:, 0], runs_with_clusters, strict=True):
        _raster(axis, run)
        if len(runs) > 1:
            axis.set_title(run.label, fontsize=9, loc="left")
    _legend(figure)
    return figure


def _raster(axis: Axes, run: RunData) -> None:
    """Spans of equal states; hatches and lightness tell them apart."""
    states, numbers = run.states(), run.numbers
    rows = len(run.cluster_numbers)
    for state, look in _STATES.items():
        boxes = [(*span, row - 0.4, 0.8) for row in range(rows) for span in _spans(states[row] == state, numbers)]
        add_boxes(axis, boxes, label=state, **look)
    shares = np.mean(states == "selected", axis=1)
    step = max(1, rows // 24)
    axis.set_yticks(range(0, rows, step), [f"cluster {n}" for n in run.cluster_numbers[::step]])
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(0, rows, step), [f"{100 * share:.0f} %" for share in shares[::step]])
    right.tick_params(length=0)
    axis.set_ylim(rows - 0.5, -0.5)
    axis.grid(False)
    axis.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def draw_energy(runs: Sequence[RunData]) -> Figure:
    """Energy of the rounds, and in total."""
    parts = [run.energy_parts() for run in runs]
    _need([part["devices"] for part in parts], "no round has an energy")
    figure, axes = _grid(1, 2, _HEIGHT + 0.3)
    if len(runs) == 1:
        run = runs[0]
        _stack(axes[0, 0], run, {name: np.nansum(values, axis=0) for name, values in parts[0].items()})
        _rounds(axes[0, 0], runs, "energy of a round [J]")
        totals = [{name: float(np.nansum(values[i])) for name, values in parts[0].items()}
                  for i in range(len(run.cluster_numbers))]  # fmt: skip
        _bars(axes[0, 1], [f"{n}" for n in run.cluster_numbers], totals, "energy of the whole run [J]")
        axes[0, 1].set_xlabel("cluster")
    else:
        for i, run in enumerate(runs):
            energy = run.series("virtual", "energy_j")
            _plot(axes[0, 0], run, energy, i, run.label)
        _rounds(axes[0, 0], runs, "energy of a round [J]")
        totals = [{name: float(np.nansum(values)) for name, values in part.items()} for part in parts]
        _bars(axes[0, 1], runs, totals, "energy of the whole run [J]")
    _legend(figure)
    return figure


def draw_memory(runs: Sequence[RunData]) -> Figure:
    """Memory of the devices, modelled and measured."""
    memory_by_run = [run.memory() for run in runs]
    if not any(memory_by_run):
        raise NoData("no round has a device's modelled or measured memory")
    if len(runs) == 1:
        rows, labels = sorted(memory_by_run[0].items()), [f"{n}.{k}" for n, k in sorted(memory_by_run[0])]
        pairs, whole_model_bytes = [pair for _, pair in rows], [runs[0].whole_model_bytes()]
    else:
        pairs = [_largest(memory.values()) for memory in memory_by_run]
        labels, whole_model_bytes = [run.label for run in runs], [run.whole_model_bytes() for run in runs]
    values = np.array([pair for pair in pairs] + [(w, np.nan) for w in whole_model_bytes])
    divisor, unit = _byte_unit(values)
    figure, axes = _grid(1, 1, _HEIGHT + 0.4)
    axis, x = axes[0, 0], np.arange(len(pairs))
    data = np.array(pairs) / divisor
    axis.bar(x - 0.2, data[:, 0], 0.4, color=_MIDDLE, edgecolor="black", linewidth=0.5, label="modelled")
    axis.bar(x + 0.2, data[:, 1], 0.4, color="white", edgecolor="black", linewidth=0.5, hatch="////",
             label="measured peak above an idle process")  # fmt: skip
    bounds = [(-0.5, len(pairs) - 0.5)] if len(runs) == 1 else [(i - 0.45, i + 0.45) for i in range(len(runs))]
    for i, ((low, high), value) in enumerate(zip(bounds, whole_model_bytes, strict=True)):
        if np.isfinite(value):
            label = None if i else "whole model on one device, modelled"
            axis.hlines(value / divisor, low, high, color="black", linestyle="--", linewidth=1.6, label=label)
    step = max(1, len(pairs) // 30)
    axis.set_xticks(x[::step], labels[::step], rotation=90 if len(labels) > 16 else 0)
    axis.set_xlabel("cluster.device" if len(runs) == 1 else "run: its largest device")
    axis.set_ylabel(f"memory [{unit}]")
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() > 20 * positive.min():
        _logarithmic(axis)
    _legend(figure)
    return figure


def draw_bytes(runs: Sequence[RunData]) -> Figure:
    """Bytes of messages and of the links between devices."""
    kinds = ("messages down", "messages up", "device links, modelled")
    bytes_by_run = [dict(zip(kinds, (run.series("bytes_down"), run.series("bytes_up"), run.link_bytes()), strict=True))
             for run in runs]  # fmt: skip
    _need([values for kind in bytes_by_run for values in kind.values()], "no round has counted bytes")
    divisor, unit = _byte_unit(np.concatenate([values for kind in bytes_by_run for values in kind.values()]))
    figure, axes = _grid(1, 1 if len(runs) == 1 else 3, _HEIGHT + 0.2, sharey=True)
    for column, kind in enumerate(kinds):
        axis = axes[0, 0] if len(runs) == 1 else axes[0, column]
        for i, run in enumerate(runs):
            label, look = (kind, column) if len(runs) == 1 else (run.label, i)
            if np.any(np.isfinite(bytes_by_run[i][kind])):
                _plot(axis, run, bytes_by_run[i][kind] / divisor, look, label)
        if len(runs) > 1:
            axis.set_title(kind, fontsize=9)
        _rounds(axis, runs, f"bytes of a round [{unit}]" if axis is axes[0, 0] else "")
    numbers = np.concatenate([values[values > 0] for kind in bytes_by_run for values in kind.values()])
    if len(numbers) and numbers.max() > 20 * numbers.min():
        _logarithmic(axes[0, 0])
    else:
        axes[0, 0].set_ylim(bottom=0)
    _legend(figure)
    return figure


def _grid(
    rows: int, columns: int, height: float, *, sharey: Any = False, heights: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey, height_ratios=heights)
    return figure, axes


def _curve(i: int, count: int, markers: bool = True) -> dict[str, Any]:
    """Look of the i-th curve of ``count`` points."""
    look: dict[str, Any] = {
        "color": _COLOURS[i % len(_COLOURS)],
        "linestyle": _LINES[i % len(_LINES)],
        "linewidth": 1.4,
    }
    if markers:
        # Staggered, so that curves on top of each other show both markers.
        every = max(1, count // 10)
        look |= {"marker": _MARKERS[i % len(_MARKERS)], "markersize": 4, "markevery": ((2 * i) % every, every)}
    return look


def _plot(axis: Axes, run: RunData, values: FloatArray, i: int, label: str | None, **look: Any) -> None:
    """The i-th curve over the rounds; means of some where there are very many."""
    x = _means(run.numbers, _window(run))
    axis.plot(x, _means(values, _window(run)), label=label, **_curve(i, len(x)) | look)


def _window(run: RunData) -> int:
    """Rounds of which a long run shows the mean."""
    return -(-len(run.numbers) // _MOST)


def _means(values: FloatArray, width: int) -> FloatArray:
    """Mean of each ``width`` values, of those that are there."""
    windows = np.append(values, np.full(-len(values) % width, np.nan)).reshape(-1, width)
    is_known = np.isfinite(windows)
    means = np.where(is_known, windows, 0.0).sum(axis=1) / np.maximum(is_known.sum(axis=1), 1)
    return np.where(is_known.any(axis=1), means, np.nan)


def _stack(axis: Axes, run: RunData, parts: Mapping[str, FloatArray]) -> None:
    """Areas on top of each other, a step a round."""
    width = _window(run)
    edges = np.append(run.numbers[::width] - 0.5, run.numbers[-1] + 0.5)
    base = np.zeros(len(edges) - 1)
    for (name, values), (colour, hatch) in zip(parts.items(), _AREAS, strict=False):
        top = base + np.nan_to_num(_means(values, width))
        if np.any(top > base):
            axis.stairs(top, edges, baseline=base, fill=True, facecolor=colour, edgecolor="#333333", linewidth=0.4,
                        hatch=hatch, label=name)  # fmt: skip
        base = top
    axis.set_ylim(bottom=0)


_AREAS = ((_MIDDLE, None), ("#f6c667", "////"), ("#ffffff", "...."))
"""Colour and hatch of stacked parts."""


def _bars(axis: Axes, owners: Sequence[RunData | str], parts: Sequence[Mapping[str, float]], unit: str) -> None:
    """One stacked bar for each owner."""
    base = np.zeros(len(parts))
    for name, (colour, hatch) in zip(parts[0], _AREAS, strict=False):
        values = np.nan_to_num([part[name] for part in parts])
        if np.any(values > 0):
            axis.bar(range(len(parts)), values, 0.6, bottom=base, color=colour, hatch=hatch, edgecolor="#333333",
                     linewidth=0.5, label=name)  # fmt: skip
        base = base + values
    labels = [owner if isinstance(owner, str) else owner.label for owner in owners]
    step = max(1, len(labels) // 24)
    long = max(map(len, labels)) * len(labels) > 60
    axis.set_xticks(range(0, len(labels), step), labels[::step], rotation=20 * long, ha="right" if long else "center")
    axis.set_ylabel(unit)


def _rounds(axis: Axes, runs: Sequence[RunData], label: str) -> None:
    widest = max(_window(run) for run in runs)
    axis.set_xlabel("round" if widest == 1 else f"round (means of {widest})")
    axis.set_ylabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def _logarithmic(axis: Axes) -> None:
    axis.set_yscale("log")
    # Text as it is: the default is TeX.
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure) -> None:
    """One above all panels, with each label once."""
    looks: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            looks.setdefault(label, handle)
    if looks:
        one_row = sum(len(label) + 8 for label in looks) < 150
        columns = len(looks) if one_row else max(1, 150 // (max(map(len, looks)) + 8))
        figure.legend(looks.values(), looks.keys(), loc="outside upper left", ncols=columns, frameon=False)


def _blank(axis: Axes, why: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, f"no data: {why}", transform=axis.transAxes, ha="center", va="center", color="#555555")


def _need(series: Sequence[FloatArray], why: str) -> None:
    if not any(np.any(np.isfinite(values)) for values in series):
        raise NoData(why)


def _spans(chosen: NDArray[np.bool_], numbers: FloatArray) -> list[tuple[float, float]]:
    """Start and length of each stretch of consecutive rounds."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    return [(float(numbers[a]) - 0.5, float(numbers[b - 1] - numbers[a]) + 1.0) for a, b in edges.reshape(-1, 2)]


def _mean(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _last(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")


def _largest(pairs: Any) -> tuple[float, float]:
    array = np.array([*pairs, (np.nan, np.nan)])
    low = np.where(np.isfinite(array), array, -np.inf).max(axis=0)
    return tuple(np.where(np.isfinite(low), low, np.nan).tolist())


def _byte_unit(values: FloatArray) -> tuple[float, str]:
    """Divisor and name of the decimal unit in which the largest value is readable."""
    known = values[np.isfinite(values)]
    largest = float(known.max()) if len(known) else 0.0
    return next(((d, unit) for d, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= d), (1.0, "byte"))
