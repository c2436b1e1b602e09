"""Not in the paper: for which V the virtual queues level off, over many planned rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, planned
from flower_app.training.network import training_scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = 10
"""Rows of a network: its rounds in as many equal parts."""
_GROWTH, _ALWAYS = 1.1, 0.5
"""A queue levels off if its last part is at most so many times, and so much above, the part in the middle."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each tenth of each network's rounds."""
    del folder
    for curve in curves:
        scenario = training_scenario(curve.config)
        of_part: list[tuple[float, float, np.ndarray]] = []
        size = max(1, curve.config.num_rounds // _PARTS)
        for seed, planned_round in planned(curve, say):
            of_part.append(
                (float(np.max(planned_round.queues.virtual)), planned_round.latency_event_s, planned_round.gamma)
            )
            if len(of_part) == size:
                queues, delays, gammas = zip(*of_part, strict=True)
                yield {
                    "curve": curve.name,
                    "label": curve.label,
                    "scenario": scenario.name,
                    "v": planned_round.instance.V,
                    "gamma_max": scenario.planner.gamma_max,
                    "seed": seed,
                    "round": planned_round.number,
                    "longest_queue": float(np.mean(queues)),
                    "latency_event_s": float(np.mean(delays)),
                    **{f"gamma_{n + 1}": float(value) for n, value in enumerate(np.mean(gammas, axis=0))},
                }
                of_part = []


def draw(rows: Sequence[Row]) -> Figure:
    """Longest queue of each network over the rounds, one panel for each V."""
    names = distinct(rows, "curve")
    columns = 4
    figure, axes = style.figure(13, 2.9 * -(-len(names) // columns), -(-len(names) // columns), columns)
    for axis, name in zip(axes, names, strict=False):
        curve_rows = select(rows, curve=name)
        for i, seed in enumerate(distinct(curve_rows, "seed")):
            parts = select(curve_rows, seed=seed)
            style.curve(axis, i, [row["round"] for row in parts], [row["longest_queue"] for row in parts], "")
        axis.set_title(curve_rows[0]["label"], fontsize=9)
        style.label(axis, "round", "longest queue Y")
        axis.set_ylim(bottom=0)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    return figure


def levels_off(parts: Sequence[Row]) -> bool:
    """Return True if a network's longest queue has stopped growing from the middle part of the rounds to the last."""
    middle, last = parts[(len(parts) - 1) // 2]["longest_queue"], parts[-1]["longest_queue"]
    return bool(last <= _GROWTH * middle + _ALWAYS)


def largest_gamma(parts: Sequence[Row]) -> float:
    """Return the largest mean bound of a cluster over the second half of the rounds."""
    half = parts[len(parts) // 2 :]
    columns = [c for c in half[0] if c.startswith("gamma_") and c.removeprefix("gamma_").isdigit()]
    return max(float(np.mean([row[c] for row in half])) for c in columns if half[0][c] is not None)


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Return, for each V, the longest queue at half time and at the end, and the networks in which it levels off."""
    paper_findings = []
    for name in distinct(rows, "curve"):
        curve_rows = select(rows, curve=name)
        networks = [select(curve_rows, seed=seed) for seed in distinct(curve_rows, "seed")]
        middle, middle_spread = mean_spread([parts[(len(parts) - 1) // 2]["longest_queue"] for parts in networks])
        last, last_spread = mean_spread([parts[-1]["longest_queue"] for parts in networks])
        gammas = [largest_gamma(parts) for parts in networks]
        gamma, gamma_spread = mean_spread(gammas)
        delay, delay_spread = mean_spread(
            [float(np.mean([row["latency_event_s"] for row in parts[len(parts) // 2 :]])) for parts in networks]
        )
        threshold, level = curve_rows[0]["gamma_max"], sum(levels_off(parts) for parts in networks)
        over = [100 * (value / threshold - 1) for value in gammas if value > threshold]
        above = f"over it in {len(over)} of {len(gammas)}" + (f", by {max(over):.2f} % at most" if over else "")
        middle_round = networks[0][(len(networks[0]) - 1) // 2]["round"]
        paper_findings.append(
            PaperFinding(
                what=curve_rows[0]["label"],
                paper="-",
                ours=f"longest queue {middle:.1f} ± {middle_spread:.1f} up to round {middle_round}, "
                f"{last:.1f} ± {last_spread:.1f} up to round {networks[0][-1]['round']}; levelled off in {level} of "
                f"{len(networks)} networks",
                why=f"Γ of the cluster that has most, second half: {gamma:.3f} ± {gamma_spread:.3f}, threshold "
                f"{threshold:g}, {above}; {delay:.1f} ± {delay_spread:.1f} s a round",
            )
        )
    return paper_findings


EXPERIMENT = Experiment(
    name="queues", shows="for which V the virtual queues level off", run=run, draw=draw, findings=findings
)
