"""Fig. 4: the pipeline's time over S and m, even split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from flower_app.experiments.experiment import Curve, Experiment, Finding, Row, distinct, select
from flower_app.experiments.planning import networks
from strategies.accounting import pipeline_work
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.segment_choices import even_parts, plan_on_fastest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES = (("eq15_s", "Eq. (15)"), ("fused_s", "event-simulated, fused chunks"), ("gpipe_s", "event-simulated, GPipe"))


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each S and m: means over networks and clusters.

    ``[figure]`` has ``segments`` and ``micro-batches``, lists of integers.
    """
    del folder
    for curve in curves:
        say(f"{curve.name}: {curve.seeds} networks")
        instances = [_instance(scenario) for _, scenario in networks(curve)]
        for num_segments in curve.figure["segments"]:
            for m in curve.figure["micro-batches"]:
                yield {"curve": curve.name, "segments": num_segments, "m": m} | _means(instances, num_segments, m)


def _instance(scenario: Scenario) -> Instance:
    return round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters))


def _means(instances: Sequence[Instance], num_segments: int, m: int) -> Row:
    works, fits = [], 0
    for instance in instances:
        for n in range(instance.num_clusters):
            plan = plan_on_fastest(instance, n, even_parts(instance.L, num_segments), m)
            works.append(pipeline_work(instance, n, plan))
            memory = instance.device_arrays(n).mem
            fits += bool(np.all(np.asarray(plan.delta) * instance.gamma0 <= memory))
    return {
        "eq15_s": float(np.mean([w.pipeline_eq15_s for w in works])),
        "fused_s": float(np.mean([w.pipeline_fused_s for w in works])),
        "gpipe_s": float(np.mean([w.pipeline_s for w in works])),
        "fits": fits / len(works),
    }


def draw(rows: Sequence[Row]) -> Figure:
    """One heat map for each way to count the time; the best cell is marked, what memory refuses is crossed out."""
    from matplotlib.colors import LogNorm

    from flower_app.experiments import style

    drawn, axes = style.figure(13, 4, columns=3)
    sizes, counts = distinct(rows, "segments"), distinct(rows, "m")
    for axis, (column, title) in zip(axes, _TIMES, strict=True):
        table = np.array([[select(rows, segments=s, m=m)[0][column] for m in counts] for s in sizes])
        image = axis.imshow(table, aspect="auto", origin="lower", cmap=style.HEAT, norm=LogNorm())
        for i, size in enumerate(sizes):
            if select(rows, segments=size)[0]["fits"] < 1:
                axis.text(len(counts) / 2 - 0.5, i, "over the memory of some devices (C7)", ha="center", va="center",
                          fontsize=7, color="white", bbox={"color": "0.2", "pad": 1.5})  # fmt: skip
        best = np.unravel_index(int(np.argmin(table)), table.shape)
        axis.plot(best[1], best[0], marker="*", markersize=13, color="white", markeredgecolor="black")
        axis.set_xticks(range(len(counts)), [str(m) for m in counts], fontsize=8)
        axis.set_yticks(range(len(sizes)), [str(s) for s in sizes])
        style.label(axis, "micro-batches m", "segments S", title)
        axis.grid(visible=False)
        drawn.colorbar(image, ax=axis, label="one step [s]")
    return drawn


def findings(rows: Sequence[Row]) -> list[Finding]:
    """The best S and m."""
    ours = []
    for column, title in _TIMES:
        best = min(rows, key=lambda row: row[column])
        ours.append(f"{title}: S = {best['segments']}, m = {best['m']}, {best[column]:.0f} s")
    return [
        Finding(
            what="best S and m of an even split",
            paper="there is one",
            ours="; ".join(ours),
            why="S and m both have an optimum inside the grid: more segments pay links, more micro-batches pay their "
            "fixed cost; where it lies depends on the network, which the paper does not print in full",
        )
    ]


EXPERIMENT = Experiment(
    name="fig4", shows="time of a step over S and m, even split", run=run, draw=draw, findings=findings
)
