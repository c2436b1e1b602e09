"""Fig. 11: total delay against selection by loss, delay and chance, for several V; with the bound and fairness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, planned, quarter, settled
from experiments.base.results import quarter_rows
from flower_app.training.network import training_scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = {"loss-only": "-46.44 %", "delay-only": "-15.48 %", "random": "-7.12 %"}
"""By baseline: the published change of the delay; that of loss-only is for V = 0.01, of the others it does not say."""
_RANKS = {
    "delay-only": "the clusters whose own round would be shortest; some are never selected, and their queues grow",
    "random": "clusters by chance, others in every round",
    "loss-only": "the clusters of largest loss, by a generated trace that knows nothing of the network: so its delay "
    "is that of random",
}
"""By baseline: whom it selects; ours, as the paper prints little more than the names."""
_SEGMENTS = {"": "uniform segments, m = 8", "optimal": "segments and m of least pipeline time"}


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each round of each network."""
    del folder
    for curve in curves:
        gamma_max = training_scenario(curve.config).planner.gamma_max
        for seed, planned_round in planned(curve, say):
            yield {
                "curve": curve.name,
                "label": curve.label,
                "policy": curve.config.policy,
                "v": planned_round.instance.V,
                "seed": seed,
                "round": planned_round.number,
                "latency_eq15_s": planned_round.latency_s,
                "latency_event_s": planned_round.latency_event_s,
                "gamma": float(np.mean(planned_round.gamma)),
                "gamma_max": gamma_max,
                "queue": float(np.mean(planned_round.queues.virtual)),
                "longest_queue": float(np.max(planned_round.queues.virtual)),
                "energy_j": planned_round.energy_j,
                **{f"gamma_{n + 1}": float(value) for n, value in enumerate(planned_round.gamma)},
                **{f"selected_{n + 1}": int(chosen) for n, chosen in enumerate(planned_round.selected)},
            }


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index of how often each cluster was selected: 1 is equal, 1/N is one cluster alone."""
    values = np.asarray(shares)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if values.any() else 0.0


def _of(rows: Sequence[Row], name: str, column: str) -> tuple[float, float]:
    """Mean and spread over the networks of their settled rounds' mean."""
    return mean_spread(_by_seed(rows, name, column))


def _by_seed(rows: Sequence[Row], name: str, column: str) -> list[float]:
    curve_rows = select(rows, curve=name)
    return [
        float(np.mean([row[column] for row in settled(select(curve_rows, seed=seed))]))
        for seed in distinct(curve_rows, "seed")
    ]


def _clusters(rows: Sequence[Row], name: str, column: str) -> list[list[float]]:
    """By network: each cluster's mean over the settled rounds."""
    columns = [key for key in rows[0] if key.startswith(f"{column}_") and key.removeprefix(f"{column}_").isdigit()]
    by_cluster = [_by_seed(rows, name, key) for key in columns]
    return [list(values) for values in zip(*by_cluster, strict=True)]


def _largest_gamma(rows: Sequence[Row], name: str) -> list[float]:
    """By network: mean bound of the cluster that has most, since C10 holds each cluster to the threshold."""
    return [max(values) for values in _clusters(rows, name, "gamma")]


def _fairness(rows: Sequence[Row], name: str) -> tuple[float, float]:
    return mean_spread([jain(shares) for shares in _clusters(rows, name, "selected")])


def draw(rows: Sequence[Row]) -> Figure:
    """Latency, bound, energy and fairness of each policy; the accumulated delay over the rounds."""
    figure, axes = style.figure(13, 7.5, 2, 3)
    names = distinct(rows, "curve")
    labels = [select(rows, curve=name)[0]["label"] for name in names]
    total, latency, bound, queue, energy, fair = axes
    for i, (name, text) in enumerate(zip(names, labels, strict=True)):
        curve_rows = select(rows, curve=name)
        seeds = distinct(curve_rows, "seed")
        for axis, column, add in ((total, "latency_event_s", True), (queue, "longest_queue", False)):
            lines = [[row[column] for row in select(curve_rows, seed=seed)] for seed in seeds]
            table = np.array(lines, dtype=float)
            values = np.nancumsum(table, axis=1).mean(axis=0) / 3600 if add else table.mean(axis=0)
            style.curve(axis, i, range(1, table.shape[1] + 1), values.tolist(), text)
    style.label(total, "round", "accumulated delay [h]")
    style.label(queue, "round", "longest queue of a cluster, Y")
    total.set_ylim(top=1.5 * total.get_ylim()[1])  # room for the legend
    total.legend(fontsize=6.5, ncols=2, loc="upper left")
    for axis, column, text in (
        (latency, "latency_event_s", "round latency, event-simulated [s]"),
        (energy, "energy_j", "energy of a round [J]"),
    ):
        means, spreads = zip(*(_of(rows, name, column) for name in names), strict=True)
        style.bars(axis, labels, means, spreads)
        style.label(axis, "", text)
    largest, spreads = zip(*(mean_spread(_largest_gamma(rows, name)) for name in names), strict=True)
    style.bars(bound, labels, largest, spreads)
    style.label(bound, "", "mean Γ of the cluster that has most")
    bound.axhline(rows[0]["gamma_max"], color="black", linestyle="--", linewidth=1)
    bound.set_ylim(bottom=0.9 * min(largest))
    means, spreads = zip(*(_fairness(rows, name) for name in names), strict=True)
    style.bars(fair, labels, means, spreads)
    style.label(fair, "", "Jain's fairness of the selection")
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """DSSDA's delay with each V against each selection baseline's, network by network; then each curve's own."""
    names = distinct(rows, "curve")
    first_rows = {name: select(rows, curve=name)[0] for name in names}
    dssda = [name for name in names if first_rows[name]["policy"] == "dssda"]
    paper_findings = []
    for name in names:
        if name in dssda or not dssda:
            continue
        rank, _, segments = first_rows[name]["policy"].partition("+")
        paper_findings.append(
            PaperFinding(
                what=f"delay of DSSDA against {first_rows[name]['label']}",
                paper=_PAPER.get(first_rows[name]["policy"], "-"),
                ours="; ".join(
                    f"V = {first_rows[dssda_name]['v']:g}: {_change(rows, dssda_name, name)}" for dssda_name in dssda
                ),
                why=f"{_RANKS.get(rank, 'not in the paper')}; {_SEGMENTS.get(segments, segments)}, channels by upload "
                "time, full power",
            )
        )
    paper_findings += [
        PaperFinding(
            what=f"the same by quarters of the rounds, against {first_rows[name]['label']}",
            paper="the advantage grows with the rounds",
            ours="; ".join(
                f"V = {first_rows[dssda_name]['v']:g}: {_change_by_quarter(rows, dssda_name, name)}"
                for dssda_name in dssda
            ),
            why="of each quarter alone; what is accumulated grows with any difference",
        )
        for name in names
        if dssda and first_rows[name]["policy"] in _PAPER
    ]
    for name in names:
        (delay, spread), gammas = _of(rows, name, "latency_event_s"), _largest_gamma(rows, name)
        (gamma, width), threshold = mean_spread(gammas), first_rows[name]["gamma_max"]
        queue, fair = _of(rows, name, "longest_queue")[0], _fairness(rows, name)[0]
        num_within = sum(value <= threshold for value in gammas)
        paper_findings.append(
            PaperFinding(
                what=f"{first_rows[name]['label']}: delay and bound",
                paper="-",
                ours=f"{delay:.1f} ± {spread:.1f} s; Γ of the cluster that has most {gamma:.2f} ± {width:.2f}, of all "
                f"{_of(rows, name, 'gamma')[0]:.2f}; longest queue {queue:.1f}; fairness {fair:.2f}",
                why=f"every cluster keeps the threshold {threshold:.1f} in {num_within} of {len(gammas)} networks",
            )
        )
    paper_findings.append(
        PaperFinding(
            what="latency reduction of the abstract",
            paper="-48.98 %",
            ours="-",
            why="no figure of the paper shows it, so there is nothing to compare with",
        )
    )
    return paper_findings


def _change(rows: Sequence[Row], name: str, reference_name: str) -> str:
    pairs = zip(_by_seed(rows, name, "latency_event_s"), _by_seed(rows, reference_name, "latency_event_s"), strict=True)
    mean, spread = mean_spread([100 * (a - b) / b for a, b in pairs])
    return f"{mean:+.1f} ± {spread:.1f} %"


def _change_by_quarter(rows: Sequence[Row], name: str, reference_name: str) -> str:
    """Mean change over the networks in each quarter of the rounds."""
    texts = []
    for part in range(1, 5):
        changes = []
        for seed in distinct(select(rows, curve=name), "seed"):
            ours, theirs = (_mean_delay(select(rows, curve=c, seed=seed), part) for c in (name, reference_name))
            changes.append(100 * (ours - theirs) / theirs)
        texts.append(f"{mean_spread(changes)[0]:+.1f}")
    return ", ".join(texts) + " %"


def _mean_delay(network_rows: Sequence[Row], part: int) -> float:
    """Mean delay of a quarter of a network's rounds [s]; NaN if it has none."""
    last = max(row["round"] for row in network_rows)
    delays = [row["latency_event_s"] for row in network_rows if quarter(row["round"], last) == part]
    return float(np.mean(delays)) if delays else float("nan")


EXPERIMENT = Experiment(
    name="fig11", shows="total delay against selection by loss, delay and chance", run=run, draw=draw,
    findings=findings, compact=quarter_rows,
)  # fmt: skip
