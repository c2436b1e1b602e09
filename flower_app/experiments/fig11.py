"""Fig. 11: total delay against selection by loss, delay and chance, for several V; with the bound and fairness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_app.experiments.experiment import Curve, Experiment, Finding, Row, distinct, select
from flower_app.experiments.planning import mean_spread, planned, settled
from flower_app.training_network import training_scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = {"loss-only": "-46.44 %", "delay-only": "-15.48 %", "random": "-7.12 %"}
_REFERENCE_V = 1.0
"""V of the DSSDA curve that the findings compare with: the smallest bound-keeping delay."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each round of each network."""
    del folder
    for curve in curves:
        gamma_max = training_scenario(curve.config).planner.gamma_max
        for seed, done in planned(curve, say):
            yield {
                "curve": curve.name,
                "label": curve.label,
                "policy": curve.config.policy,
                "v": done.instance.V,
                "seed": seed,
                "round": done.number,
                "latency_eq15_s": done.latency_s,
                "latency_event_s": done.latency_event_s,
                "gamma": float(np.mean(done.gamma)),
                "gamma_max": gamma_max,
                "queue": float(np.mean(done.queues.virtual)),
                "energy_j": done.energy_j,
                "selected": " ".join("1" if chosen else "0" for chosen in done.selected),
            }


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index of how often each cluster was selected: 1 is equal, 1/N is one cluster alone."""
    values = np.asarray(shares)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if values.any() else 0.0


def _of(rows: Sequence[Row], name: str, column: str) -> tuple[float, float]:
    """Mean and spread over the networks of their settled rounds' mean."""
    return mean_spread(_by_seed(rows, name, column))


def _by_seed(rows: Sequence[Row], name: str, column: str) -> list[float]:
    mine = select(rows, curve=name)
    return [
        float(np.mean([row[column] for row in settled(select(mine, seed=seed))])) for seed in distinct(mine, "seed")
    ]


def _fairness(rows: Sequence[Row], name: str) -> tuple[float, float]:
    mine = select(rows, curve=name)
    values = []
    for seed in distinct(mine, "seed"):
        table = [[int(v) for v in row["selected"].split()] for row in settled(select(mine, seed=seed))]
        values.append(jain(np.mean(table, axis=0)))
    return mean_spread(values)


def draw(rows: Sequence[Row]) -> Figure:
    """Latency, bound, energy and fairness of each policy; the accumulated delay over the rounds."""
    from flower_app.experiments import style

    drawn, axes = style.figure(13, 7.5, 2, 3)
    names = distinct(rows, "curve")
    labels = [select(rows, curve=name)[0]["label"] for name in names]
    total, latency, bound, queue, energy, fair = axes
    for i, (name, text) in enumerate(zip(names, labels, strict=True)):
        mine = select(rows, curve=name)
        seeds = distinct(mine, "seed")
        for axis, column, add in ((total, "latency_event_s", True), (queue, "queue", False)):
            lines = [[row[column] for row in select(mine, seed=seed)] for seed in seeds]
            table = np.array(lines, dtype=float)
            values = np.nancumsum(table, axis=1).mean(axis=0) / 3600 if add else table.mean(axis=0)
            style.curve(axis, i, range(1, table.shape[1] + 1), values.tolist(), text)
    style.label(total, "round", "accumulated delay [h]")
    style.label(queue, "round", "mean queue Y")
    total.legend(fontsize=6.5, ncols=2)
    for axis, column, text in (
        (latency, "latency_event_s", "round latency, event-simulated [s]"),
        (bound, "gamma", "mean bound Γ"),
        (energy, "energy_j", "energy of a round [J]"),
    ):
        means, spreads = zip(*(_of(rows, name, column) for name in names), strict=True)
        style.bars(axis, labels, means, spreads)
        style.label(axis, "", text)
    bound.axhline(rows[0]["gamma_max"], color="black", linestyle="--", linewidth=1)
    bound.set_ylim(bottom=0.9 * min(row["gamma"] for row in rows))
    means, spreads = zip(*(_fairness(rows, name) for name in names), strict=True)
    style.bars(fair, labels, means, spreads)
    style.label(fair, "", "Jain's fairness of the selection")
    return drawn


def findings(rows: Sequence[Row]) -> list[Finding]:
    """DSSDA's delay against each selection baseline's, network by network."""
    names = distinct(rows, "curve")
    dssda = [name for name in names if select(rows, curve=name)[0]["policy"] == "dssda"]
    own = min(dssda, key=lambda name: abs(select(rows, curve=name)[0]["v"] - _REFERENCE_V))
    found = []
    for name in names:
        first = select(rows, curve=name)[0]
        if name in dssda:
            continue
        pairs = zip(_by_seed(rows, own, "latency_event_s"), _by_seed(rows, name, "latency_event_s"), strict=True)
        mean, spread = mean_spread([100 * (a - b) / b for a, b in pairs])
        bound = _of(rows, name, "gamma")[0]
        kept = "keeps" if bound <= first["gamma_max"] else "breaks"
        found.append(
            Finding(
                what=f"delay of {select(rows, curve=own)[0]['label']} against {first['label']}",
                paper=_PAPER.get(first["policy"], "-"),
                ours=f"{mean:+.1f} ± {spread:.1f} %",
                why=f"mean Γ {bound:.2f} {kept} the threshold {first['gamma_max']:.1f}",
            )
        )
    for name in dssda:
        first = select(rows, curve=name)[0]
        (delay, spread), bound = _of(rows, name, "latency_event_s"), _of(rows, name, "gamma")[0]
        fair, queue = _fairness(rows, name)[0], _of(rows, name, "queue")[0]
        found.append(
            Finding(
                what=f"{first['label']}: delay and bound",
                paper="-",
                ours=f"{delay:.1f} ± {spread:.1f} s, Γ {bound:.2f} of {first['gamma_max']:.1f}, Y {queue:.1f}, "
                f"fairness {fair:.2f}",
                why="V weighs delay against the queue"
                + ("" if bound <= first["gamma_max"] else "; so large a V does not keep Γ within these rounds"),
            )
        )
    found.append(
        Finding(
            what="latency reduction of the abstract",
            paper="-48.98 %",
            ours="-",
            why="no figure of the paper shows it, so there is nothing to compare with",
        )
    )
    return found


EXPERIMENT = Experiment(
    name="fig11", shows="total delay against selection by loss, delay and chance", run=run, draw=draw, findings=findings
)
