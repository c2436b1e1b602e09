"""Curves of a training comparison: the metric over rounds, virtual time, bytes and joules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

_AXES = (
    ("round", 2, 1.0),
    ("virtual time [h]", 3, 3600.0),
    ("Flower messages [MB]", 4, 1e6),
    ("modelled energy [kJ]", 5, 1e3),
)
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osv^Dx*+P<>"


def draw_curves(rows: Sequence[Sequence[Any]], metric: str, path: Path) -> None:
    """Draw the rows of ``curves.csv``: the metric where it was evaluated, one curve for each name and seed.

    Parameters
    ----------
    rows : name, seed, round, virtual_s, bytes, energy_j, train_loss, metric
    metric : its name
    path : a PNG
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flat
    names = list(dict.fromkeys(row[0] for row in rows))
    for axis, (label, column, unit) in zip(axes, _AXES, strict=True):
        for i, name in enumerate(names):
            for seed in dict.fromkeys(row[1] for row in rows if row[0] == name):
                points = [row for row in rows if row[:2] == [name, seed] and row[7] is not None]
                axis.plot(
                    [row[column] / unit for row in points],
                    [row[7] for row in points],
                    linestyle=_STYLES[i % len(_STYLES)],
                    marker=_MARKERS[i % len(_MARKERS)],
                    markersize=4,
                    linewidth=1.2,
                    color=f"C{i % 10}",
                    label=name if seed == 0 else None,
                )
        axis.set_xlabel(label)
        axis.set_ylabel(metric)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)
