"""Figs. 7 and 8: accumulated computation time, with and without segment scheduling, beside the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, planned, settled
from experiments.base.results import mean_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = {
    "vanilla-fl": "-15.09 %",
    "titanic": "-18.94 %",
    "pipeline": "-40.55 %",
    "uniform": "-18.33 % (+22.45 % without scheduling)",
}
"""By policy or strategy: the published change of CollaPipe's computation time."""
_WHY = {
    "vanilla-fl": "every device trains the whole model on its share of the batch; C7 and C9 are waived for it",
    "titanic": "segments in proportion to speed, m = 8: ours, as the paper does not print what its TITANIC does",
    "pipeline": "even segments over all devices, the slowest too; the paper does not say which devices it uses",
    "uniform": "uniform segments on the fastest devices, m = 8; same channels and powers",
}


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each round of each network: means over the clusters that train."""
    del folder
    for curve in curves:
        for seed, planned_round in planned(curve, say):
            works = [c.work for c in planned_round.costs.clusters if c is not None]
            if not works:
                continue
            steps = curve.config.local_steps
            yield {
                "curve": curve.name,
                "label": curve.label,
                "what": curve.config.policy if curve.config.strategy == "collapipe" else curve.config.strategy,
                "seed": seed,
                "round": planned_round.number,
                "eq15_s": steps * float(np.mean([w.pipeline_eq15_s for w in works])),
                "event_s": steps * float(np.mean([w.pipeline_fused_s for w in works])),
                "gpipe_s": steps * float(np.mean([w.pipeline_s for w in works])),
                "latency_s": planned_round.latency_event_s,
                "energy_j": planned_round.energy_j,
            }


def draw(rows: Sequence[Row]) -> Figure:
    """Accumulated computation time over the rounds, and one step's by both ways to count."""
    figure, (total, step) = style.figure(11, 4.6, columns=2)
    names = distinct(rows, "curve")
    for i, name in enumerate(names):
        curve_rows = select(rows, curve=name)
        sums = [
            np.cumsum([row["event_s"] for row in select(curve_rows, seed=seed)]) / 3600
            for seed in distinct(curve_rows, "seed")
        ]
        length = min(map(len, sums))
        table = np.array([values[:length] for values in sums])
        spread = table.std(axis=0, ddof=1) if len(sums) > 1 else ()
        style.curve(total, i, range(1, length + 1), table.mean(axis=0), curve_rows[0]["label"], spread)
    style.label(total, "round", "accumulated time, event-simulated [h]")
    total.legend(fontsize=8)
    labels = [select(rows, curve=name)[0]["label"] for name in names]
    at = np.arange(len(names))
    for i, (column, text) in enumerate((("eq15_s", "Eq. (15)"), ("event_s", "event-simulated"))):
        means, spreads = zip(*(mean_spread(_by_seed(rows, name, column)) for name in names), strict=True)
        step.bar(at + 0.4 * i, means, 0.4, yerr=spreads, capsize=3, color=["0.35", "0.85"][i], edgecolor="0.15",
                 hatch=style.HATCHES[i], label=text)  # fmt: skip
    step.set_xticks(at + 0.2, labels, rotation=20, ha="right", fontsize=8)
    style.label(step, "", "computation time of a round [s]")
    step.legend(fontsize=8)
    return figure


def _by_seed(rows: Sequence[Row], name: str, column: str) -> list[float]:
    """Mean over each network's settled rounds."""
    curve_rows = select(rows, curve=name)
    per_seed = (settled(select(curve_rows, seed=seed)) for seed in distinct(curve_rows, "seed"))
    return [float(np.mean([row[column] for row in seed_rows])) for seed_rows in per_seed]


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """CollaPipe's time against each other curve's, network by network."""
    names = distinct(rows, "curve")
    first_name = names[0]
    paper_findings = []
    for name in names[1:]:
        first_row = select(rows, curve=name)[0]
        paper_findings.append(
            PaperFinding(
                what=f"computation time of {select(rows, curve=first_name)[0]['label']} against {first_row['label']}",
                paper=_PAPER.get(first_row["what"], "-"),
                ours=_changes(rows, first_name, name),
                why=_WHY.get(first_row["what"], "not in the paper"),
            )
        )
    by_what = {select(rows, curve=name)[0]["what"]: name for name in names}
    if {"vanilla-fl", "pipeline"} <= by_what.keys():
        paper_findings.append(
            PaperFinding(
                what="computation time of VanillaFL against PipeLine",
                paper="-29.98 %",
                ours=_changes(rows, by_what["vanilla-fl"], by_what["pipeline"]),
                why="the same definitions as above",
            )
        )
    return paper_findings


def _changes(rows: Sequence[Row], name: str, reference_name: str) -> str:
    """Change of a curve against another by both ways to count: mean and spread over the networks."""
    parts = []
    for column, text in (("eq15_s", "Eq. (15)"), ("event_s", "event-simulated")):
        pairs = list(zip(_by_seed(rows, name, column), _by_seed(rows, reference_name, column), strict=True))
        mean, spread = mean_spread([100 * (a - b) / b for a, b in pairs])
        slower = sum(a > b for a, b in pairs)
        parts.append(f"{mean:+.1f} ± {spread:.1f} % {text}, slower in {slower} of {len(pairs)}")
    return "; ".join(parts)


FIG7 = Experiment(
    name="fig7",
    shows="accumulated computation time, Transformer",
    run=run,
    draw=draw,
    findings=findings,
    compact=mean_rows,
)
FIG8 = Experiment(
    name="fig8", shows="accumulated computation time, BERT", run=run, draw=draw, findings=findings, compact=mean_rows
)
