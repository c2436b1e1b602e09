"""Fig. 5: segments and micro-batches of clusters with unequal devices, against an even split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.partition.plan import ClusterPlan
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import per_cent, planned
from strategies.planning.dry_run import PlannedRound
from strategies.planning.plan_demands import plan_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = {5: 14, 4: 11, 3: 9}
"""S and m of the paper's three clusters."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each selected cluster of each round."""
    del folder
    for curve in curves:
        for seed, planned_round in planned(curve, say):
            for n, costs in enumerate(planned_round.costs.clusters):
                if costs is None:
                    continue
                plan = planned_round.plans[n]
                yield {
                    "curve": curve.name,
                    "label": curve.label,
                    "seed": seed,
                    "round": planned_round.number,
                    "cluster": n,
                    "segments": len(plan.order),
                    "m": plan.m,
                    "delta": " ".join(str(plan.delta[k]) for k in plan.order),
                    "stage_s": _stage_seconds(planned_round, n, plan),
                    "eq15_s": costs.work.pipeline_eq15_s,
                    "event_s": costs.work.pipeline_fused_s,
                    "gpipe_s": costs.work.pipeline_s,
                }


def _stage_seconds(planned_round: PlannedRound, cluster: int, plan: ClusterPlan) -> str:
    """Seconds that each stage takes for a micro-batch, forward, backward and its links, in pipeline order."""
    forward, backward, hidden_s, gradient_s, _ = plan_times(planned_round.instance, cluster, plan)
    stages = forward[:, 0] + backward[:, 0]
    stages[: len(hidden_s)] += hidden_s[:, 0] + gradient_s[:, 0]  # the last stage has no link
    return " ".join(f"{value:.4g}" for value in stages)


def draw(rows: Sequence[Row]) -> Figure:
    """Stage times of the first network's clusters, and how often each S is planned, with its mean m."""
    curves = distinct(rows, "curve")
    clusters = sorted(distinct(select(rows, seed=0, round=1), "cluster"))
    figure, axes = style.figure(13, 6.5, 2, max(len(clusters), 3))
    for axis, n in zip(axes, clusters, strict=False):
        for i, name in enumerate(curves):
            [row] = select(rows, curve=name, seed=0, round=1, cluster=n)
            stages = [float(value) for value in row["stage_s"].split()]
            at = np.arange(len(stages)) + 0.4 * i
            text = f"{row['label']}: {row['delta'].replace(' ', '-')}, m = {row['m']}, {row['event_s']:.0f} s"
            axis.bar(
                at, stages, 0.4, color=["0.35", "0.85"][i % 2], edgecolor="0.15", hatch=style.HATCHES[i], label=text
            )
        style.label(axis, "stage, fastest device first", "time of a micro-batch [s]", f"cluster {n + 1}")
        axis.legend(fontsize=7, loc="upper right")
        axis.margins(y=0.25)
    for axis in axes[len(clusters) : max(len(clusters), 3)]:
        axis.remove()
    sizes = sorted(distinct(rows, "segments"))
    share, micro, time = axes[-3], axes[-2], axes[-1]
    for i, name in enumerate(curves):
        curve_rows = select(rows, curve=name)
        counts = Counter(row["segments"] for row in curve_rows)
        at = np.arange(len(sizes)) + 0.4 * i
        colour = ["0.35", "0.85"][i % 2]
        share.bar(at, [100 * counts[s] / len(curve_rows) for s in sizes], 0.4, color=colour, edgecolor="0.15",
                  hatch=style.HATCHES[i], label=curve_rows[0]["label"])  # fmt: skip
        mean_m = [np.mean([r["m"] for r in curve_rows if r["segments"] == s]) if counts[s] else np.nan for s in sizes]
        style.curve(micro, i, sizes, mean_m, curve_rows[0]["label"])
    published = sorted(_PAPER)
    micro.plot(published, [_PAPER[s] for s in published], "k*", markersize=10, label="paper")
    share.set_xticks(np.arange(len(sizes)) + 0.2, [str(s) for s in sizes])
    labels = [select(rows, curve=name)[0]["label"] for name in curves]
    means = [float(np.mean([row["event_s"] for row in select(rows, curve=name)])) for name in curves]
    style.bars(time, labels, means)
    style.label(share, "segments S", "share of the plans [%]")
    style.label(micro, "segments S", "mean micro-batches m")
    style.label(time, "", "one step, event-simulated [s]")
    for axis in (share, micro):
        axis.legend(fontsize=8)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Give m for each S, and the even split's delay."""
    names = distinct(rows, "curve")
    planned_rows = select(rows, curve=names[0])
    paper_findings = []
    for size, published in sorted(_PAPER.items()):
        micro_batches = [row["m"] for row in planned_rows if row["segments"] == size]
        share = 100 * len(micro_batches) / len(planned_rows)
        paper_findings.append(
            PaperFinding(
                what=f"m of clusters with S = {size}",
                paper=str(published),
                ours=f"{np.mean(micro_batches):.1f} ({share:.0f} % of the plans)"
                if micro_batches
                else "S does not occur",
                why="the paper shows one network; ours is the mean over many",
            )
        )
    for name in names[1:]:
        pairs = _paired(planned_rows, select(rows, curve=name))
        slower = np.mean([other_s > ours_s for ours_s, other_s in pairs])
        our_mean, their_mean = (float(np.mean(column)) for column in zip(*pairs, strict=True))
        paper_findings.append(
            PaperFinding(
                what=f"step of {select(rows, curve=name)[0]['label']} against DSSDA, event-simulated",
                paper="one cluster is slower",
                ours=f"{per_cent(their_mean, our_mean)}; slower in {100 * slower:.0f} % of the plans",
                why="the even split takes the fastest devices and m = 8; DSSDA weighs time against the queue's S² term",
            )
        )
    return paper_findings


def _compact(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each curve, network and S: plans, mean m and times, and plans slower than the first curve's."""
    first_event_s = {
        (row["seed"], row["round"], row["cluster"]): row["event_s"] for row in select(rows, curve=rows[0]["curve"])
    }
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["curve"], row["seed"], row["segments"]), []).append(row)
    return [
        {"curve": curve, "seed": seed, "segments": size, "plans": len(group_rows)}
        | {column: float(np.mean([row[column] for row in group_rows])) for column in ("m", "eq15_s", "event_s")}
        | {"slower_than_first": sum(_slower(row, first_event_s) for row in group_rows)}
        for (curve, seed, size), group_rows in sorted(groups.items())
    ]


def _slower(row: Row, first_event_s: dict[tuple[int, int, int], float]) -> bool:
    key = (row["seed"], row["round"], row["cluster"])
    return key in first_event_s and row["event_s"] > first_event_s[key]


def _paired(our_rows: Sequence[Row], other_rows: Sequence[Row]) -> list[tuple[float, float]]:
    theirs = {(row["seed"], row["round"], row["cluster"]): row["event_s"] for row in other_rows}
    keyed = ((row, theirs.get((row["seed"], row["round"], row["cluster"]))) for row in our_rows)
    return [(row["event_s"], value) for row, value in keyed if value is not None]


EXPERIMENT = Experiment(
    name="fig5", shows="segments and micro-batches of unequal clusters against an even split",
    run=run, draw=draw, findings=findings, compact=_compact,
)  # fmt: skip
