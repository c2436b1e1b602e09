"""Panels, curves, stacks and bars of the report's figures, readable in black and white.

Curves differ by line style and marker, areas by lightness and hatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from flower_app.report.data import FloatArray, NoData, RunData

WIDTH = 9.6
"""Width of a figure [inch]."""
HEIGHT = 3.1
_MOST = 250
"""Points of a curve over the rounds; those of a longer run are means."""
_COLOURS = ("#0b559f", "#d55e00", "#2a8a62", "#8e4a96", "#7a6a00", "#4d4d4d", "#c2185b", "#0097a7")
_LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")
DARK, MIDDLE = "#1f4e79", "#6fa8d6"
_AREAS = ((MIDDLE, None), ("#f6c667", "////"), ("#ffffff", "...."), ("#dddddd", "\\\\\\\\"))
"""Colour and hatch of stacked parts."""


def new_figure(
    rows: int, columns: int, height: float, *, sharey: Any = False, heights: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """Make a figure and its panels, (rows, columns)."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey, height_ratios=heights)
    return figure, axes


def curve_look(i: int, count: int, markers: bool = True) -> dict[str, Any]:
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


def plot_curve(axis: Axes, run: RunData, values: FloatArray, i: int, label: str | None, **look: Any) -> None:
    """The i-th curve over the rounds; means of some where there are very many."""
    x = window_means(run.numbers, window_of(run))
    axis.plot(x, window_means(values, window_of(run)), label=label, **curve_look(i, len(x)) | look)


def plot_runs(axis: Axes, runs: Sequence[RunData], series: Callable[[RunData], FloatArray], unit: str) -> None:
    """Draw one curve for each run, and name the axes."""
    for i, run in enumerate(runs):
        plot_curve(axis, run, series(run), i, run.label)
    label_rounds(axis, runs, unit)


def window_of(run: RunData) -> int:
    """Rounds of which a long run shows the mean."""
    return -(-len(run.numbers) // _MOST)


def window_means(values: FloatArray, width: int) -> FloatArray:
    """Mean of each ``width`` values, of those that are there."""
    windows = np.append(values, np.full(-len(values) % width, np.nan)).reshape(-1, width)
    is_known = np.isfinite(windows)
    means = np.where(is_known, windows, 0.0).sum(axis=1) / np.maximum(is_known.sum(axis=1), 1)
    return np.where(is_known.any(axis=1), means, np.nan)


def stack_parts(axis: Axes, run: RunData, parts: Mapping[str, FloatArray]) -> None:
    """Areas on top of each other, a step a round."""
    width = window_of(run)
    edges = np.append(run.numbers[::width] - 0.5, run.numbers[-1] + 0.5)
    base = np.zeros(len(edges) - 1)
    for (name, values), (colour, hatch) in zip(parts.items(), _AREAS, strict=False):
        top = base + np.nan_to_num(window_means(values, width))
        if np.any(top > base):
            axis.stairs(top, edges, baseline=base, fill=True, facecolor=colour, edgecolor="#333333", linewidth=0.4,
                        hatch=hatch, label=name)  # fmt: skip
        base = top
    axis.set_ylim(bottom=0)


def draw_bars(axis: Axes, owners: Sequence[RunData | str], parts: Sequence[Mapping[str, float]], unit: str) -> None:
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


def label_rounds(axis: Axes, runs: Sequence[RunData], label: str) -> None:
    """Label an axis over the rounds."""
    widest = max(window_of(run) for run in runs)
    axis.set_xlabel("round" if widest == 1 else f"round (means of {widest})")
    axis.set_ylabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def make_logarithmic(axis: Axes) -> None:
    """Make the scale of values logarithmic."""
    axis.set_yscale("log")
    # Text as it is: the default is TeX.
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def add_legend(figure: Figure) -> None:
    """One above all panels, with each label once."""
    looks: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            looks.setdefault(label, handle)
    if looks:
        one_row = sum(len(label) + 8 for label in looks) < 150
        columns = len(looks) if one_row else max(1, 150 // (max(map(len, looks)) + 8))
        figure.legend(looks.values(), looks.keys(), loc="outside upper left", ncols=columns, frameon=False)


def panel_text(axis: Axes, text: str) -> None:
    """Say something in the place of a drawing."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#555555")


def need_values(series: Sequence[FloatArray], why: str) -> None:
    """Raise :class:`NoData` where no series has a value."""
    if not any(np.any(np.isfinite(values)) for values in series):
        raise NoData(why)


def known_mean(values: FloatArray) -> float:
    """Mean of the values that are there."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def byte_unit(values: FloatArray) -> tuple[float, str]:
    """Divisor and name of the decimal unit in which the largest value is readable."""
    known = values[np.isfinite(values)]
    largest = float(known.max()) if len(known) else 0.0
    return next(((d, unit) for d, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= d), (1.0, "byte"))
