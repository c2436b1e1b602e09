"""Not in the paper: the queues under P2 as printed, and under the drift of its own Lyapunov function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, planned

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each round of each network."""
    del folder
    for curve in curves:
        for seed, planned_round in planned(curve, say):
            powers = [c.power_w for c in planned_round.answer.clusters if c.power_w is not None]
            yield {
                "curve": curve.name,
                "label": curve.label,
                "seed": seed,
                "round": planned_round.number,
                "queue": float(np.mean(planned_round.queues.virtual)),
                "gamma": float(np.mean(planned_round.gamma)),
                "power_w": float(np.mean(powers)),
                "latency_s": planned_round.latency_s,
            }


_COLUMNS = (
    ("queue", "mean queue Y"),
    ("power_w", "mean transmit power [W]"),
    ("latency_s", "round latency, Eq. (15) [s]"),
)


def draw(rows: Sequence[Row]) -> Figure:
    """Queue, power and latency over the rounds."""
    figure, axes = style.figure(13, 3.8, columns=3)
    for axis, (column, text) in zip(axes, _COLUMNS, strict=True):
        for i, name in enumerate(distinct(rows, "curve")):
            curve_rows = select(rows, curve=name)
            table = np.array(
                [[row[column] for row in select(curve_rows, seed=seed)] for seed in distinct(curve_rows, "seed")]
            )
            spread = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else ()
            style.curve(
                axis, i, range(1, table.shape[1] + 1), table.mean(axis=0).tolist(), curve_rows[0]["label"], spread
            )
        style.label(axis, "round", text)
    axes[0].legend(fontsize=8)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Return, for each curve, the queue after the last round and the delay of the second half."""
    paper_findings = []
    for name in distinct(rows, "curve"):
        curve_rows = select(rows, curve=name)
        last = max(row["round"] for row in curve_rows)
        queue, spread = mean_spread([row["queue"] for row in curve_rows if row["round"] == last])
        halves = [
            [r["latency_s"] for r in select(curve_rows, seed=s) if r["round"] > last // 2]
            for s in distinct(curve_rows, "seed")
        ]
        delay, width = mean_spread([float(np.mean(half)) for half in halves])
        paper_findings.append(
            PaperFinding(
                what=f"{curve_rows[0]['label']}: queue after {last} rounds, delay of the second half",
                paper="-",
                ours=f"Y = {queue:.1f} ± {spread:.1f}; {delay:.0f} ± {width:.0f} s",
                why="(32) adds Y p, which lowers the power just when the bound is violated; the true drift raises it; "
                "C11 allows no round over the threshold, so that no queue fills",
            )
        )
    return paper_findings


EXPERIMENT = Experiment(
    name="drift", shows="queues under the printed P2 and under the true drift", run=run, draw=draw, findings=findings
)
