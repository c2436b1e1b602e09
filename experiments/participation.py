"""Not in the paper: whether a bound on unequal participation learns faster than Gamma where clusters' data differ.

Rounds are planned and trained as for ``gamma``. Each bound has the V that is fastest on the first seed; the others are
told. What counts is the virtual time to a loss that all of them reach, and to the one that Gamma ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments import gamma
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from flower_app.compare.paired_interval import paired_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, PRINTED = "participation", "gamma"
"""Names of the bounds, with which the names of their curves begin."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round of each run; ``[figure]`` as for ``gamma``."""
    for row in gamma.run(curves, folder, say):
        # What Gamma is made of says nothing of another bound.
        yield {name: value for name, value in row.items() if name not in gamma.PARTS}


def hours_until(run_rows: Sequence[Row], loss: float) -> float:
    """Return the virtual time at which a run's loss was first so low [h]; infinite if it never was."""
    before = None
    for row in run_rows:
        if row["loss"] <= loss:
            if before is None:
                return float(row["virtual_h"])
            share = (before["loss"] - loss) / (before["loss"] - row["loss"])
            return float(before["virtual_h"] + share * (row["virtual_h"] - before["virtual_h"]))
        before = row
    return float("inf")


def chosen(rows: Sequence[Row]) -> list[str]:
    """Return the curves that are compared: of each bound the V that is first at the loss that all its V reach.

    The first seed chooses.
    """
    names = distinct(rows, "curve")
    first = select(rows, seed=distinct(rows, "seed")[0])
    kept = []
    for bound in (OURS, PRINTED):
        of_bound = {name: select(first, curve=name) for name in names if name.startswith(bound)}
        if of_bound:
            common = max(run_rows[-1]["loss"] for run_rows in of_bound.values())
            kept.append(min(of_bound, key=lambda name: hours_until(of_bound[name], common)))
    return kept + [name for name in names if not name.startswith((OURS, PRINTED))]


def draw(rows: Sequence[Row]) -> Figure:
    """Loss over virtual time, and accuracy of the worst cluster."""
    figure, [(above, below)] = style.pairs_of_axes(1, height=6.5, abreast=1)
    for i, name in enumerate(chosen(rows)):
        curve_rows = select(rows, curve=name)
        for seed in distinct(curve_rows, "seed")[-5:]:
            run_rows = select(curve_rows, seed=seed)
            hours = [row["virtual_h"] for row in run_rows]
            text = run_rows[0]["label"] if seed == distinct(curve_rows, "seed")[-1] else ""
            style.curve(above, i, hours, [row["loss"] for row in run_rows], text)
            style.curve(below, i, hours, [row["worst_accuracy"] for row in run_rows], "")
    style.label(above, "virtual time [h]", "F(w) [nat]", "eight clusters, four channels, Dirichlet 0.1")
    style.label(below, "virtual time [h]", "accuracy of the worst cluster [%]", "")
    above.legend(fontsize=7)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """What each method takes to a loss that all reach, and to that which the printed bound ends with."""
    names, seeds = chosen(rows), distinct(rows, "seed")[1:] or distinct(rows, "seed")
    runs = {(name, seed): select(rows, curve=name, seed=seed) for name in names for seed in seeds}
    ends = {key: run_rows[-1] for key, run_rows in runs.items()}
    printed = next(name for name in names if name.startswith(PRINTED))
    levels = {
        "the worst method's last loss": {seed: max(ends[name, seed]["loss"] for name in names) for seed in seeds},
        "the printed bound's last loss": {seed: ends[printed, seed]["loss"] for seed in seeds},
    }
    found = []
    for name in names:
        for words, losses in levels.items():
            hours = {seed: hours_until(runs[name, seed], losses[seed]) for seed in seeds}
            reached = {seed: value for seed, value in hours.items() if np.isfinite(value)}
            mean, spread = mean_spread(list(reached.values()))
            never = "" if len(reached) == len(seeds) else f", {len(seeds) - len(reached)} of {len(seeds)} seeds never"
            found.append(
                PaperFinding(
                    what=f"{runs[name, seeds[0]][0]['label']}: virtual hours to {words}",
                    paper="-",
                    ours=f"{mean:.2f} ± {spread:.2f}{never}" if reached else "never",
                    why=_against(name, printed, runs, losses, seeds),
                )
            )
        last = [ends[name, seed] for seed in seeds]
        least = 100 * float(np.mean([row["least_selected"] for row in last]))
        found.append(
            PaperFinding(
                what=f"{last[0]['label']}: last loss",
                paper="-",
                ours=f"{_spread(last, 'loss', 3)} nat, accuracy {_spread(last, 'accuracy', 1)} %, of the worst cluster "
                f"{_spread(last, 'worst_accuracy', 1)} %",
                why=f"{_spread(last, 'virtual_h', 2)} virtual hours for {last[0]['round']} rounds; the cluster that "
                f"trains least is in {least:.0f} % of them",
            )
        )
    return found


def _against(
    name: str, printed: str, runs: dict[tuple[str, int], list[Row]], losses: dict[int, float], seeds: Sequence[int]
) -> str:
    if name == printed:
        return "the reference"
    ours, theirs = (
        {seed: value for seed in seeds if np.isfinite(value := hours_until(runs[who, seed], losses[seed]))}
        for who in (name, printed)
    )
    interval = paired_interval(ours, theirs)
    if not interval.num_pairs:
        return "no pair of seeds"
    return (
        f"{interval.mean:+.2f} h against the printed bound, {interval.low:+.2f} to {interval.high:+.2f} with 95 %, "
        f"{interval.num_pairs} pairs"
    )


def _spread(last_rows: Sequence[Row], column: str, digits: int) -> str:
    mean, spread = mean_spread([row[column] for row in last_rows])
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


EXPERIMENT = Experiment(
    name="participation", shows="whether a bound on unequal participation learns faster than Gamma", run=run, draw=draw,
    findings=findings, trains=True,
)  # fmt: skip
