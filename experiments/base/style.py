"""One look for all pictures: readable in black and white, units on every axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LINES = ("-", "--", "-.", ":")
MARKERS = "osv^Dx*+P"
HATCHES = ("", "///", "...", "\\\\\\", "xx", "++")
HEAT = "cividis"
"""Lightness grows with the value, in print too."""
_DPI = 150


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Make an empty picture of ``rows`` x ``columns`` axes; width and height in inches."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, list(np.ravel(drawn.subplots(rows, columns)))


def pairs_of_axes(number: int, height: float, abreast: int) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """Make a picture of pairs of axes, one above the other, so many pairs side by side; height of a pair in inches."""
    columns = min(number, abreast)
    blocks = -(-number // columns)
    drawn, axes = figure(4.4 * columns, height * blocks, 2 * blocks, columns)
    pairs = []
    for place in range(blocks * columns):
        block, column = divmod(place, columns)
        above, below = (axes[(2 * block + row) * columns + column] for row in (0, 1))
        if place < number:
            pairs.append((above, below))
        else:
            above.set_visible(False)
            below.set_visible(False)
    return drawn, pairs


def curve(axes: Axes, i: int, x: Sequence[float], y: Sequence[float], label: str, spread: Sequence[float] = ()) -> None:
    """Draw curve ``i``: its own line, marker and grey value; ``spread`` is shown as a band of plus and minus it."""
    shade = f"C{i % 10}"
    every = max(1, len(x) // 10)
    axes.plot(
        x, y, linestyle=LINES[i % len(LINES)], marker=MARKERS[i % len(MARKERS)], markevery=every, markersize=4,
        linewidth=1.3, color=shade, label=label,
    )  # fmt: skip
    if len(spread):
        # No quantity that is drawn with a spread can be negative.
        low, high = np.maximum(np.asarray(y) - np.asarray(spread), 0), np.asarray(y) + np.asarray(spread)
        axes.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)


def bars(axes: Axes, labels: Sequence[str], values: Sequence[float], spread: Sequence[float] = ()) -> None:
    """Draw bars side by side, each with a hatch of its own; ``spread`` as whiskers."""
    drawn = axes.bar(
        range(len(values)), values, yerr=list(spread) or None, capsize=3, color="0.85", edgecolor="0.15", linewidth=0.8
    )
    for i, bar in enumerate(drawn):
        bar.set_hatch(HATCHES[i % len(HATCHES)])
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name both axes, with their units."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def write_picture(drawn: Figure, path: Path) -> None:
    """Write a PNG; not by ``savefig``, which draws a figure that has a layout twice, the first time for nothing."""
    drawn.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(drawn)  # has no types
    canvas.print_png(path)
