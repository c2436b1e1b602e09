"""Fig. 4: the pipeline's time over S and m, even split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.partition.plan import even_parts
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, networks
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.costs import pipeline_work
from strategies.planning.segment_rules import plan_on_fastest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES = (3, 5)
"""Numbers of segments that fit into the devices' memory and are set beside each other."""
_TIMES = (("eq15_s", "Eq. (15)"), ("fused_s", "event-simulated, fused chunks"), ("gpipe_s", "event-simulated, GPipe"))


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each network, S and m: means over its clusters.

    ``[figure]`` has ``segments`` and ``micro-batches``, lists of integers.
    """
    del folder
    for curve in curves:
        say(f"{curve.name}: {curve.seeds} networks")
        for seed, scenario in networks(curve):
            instance = _instance(scenario)
            for num_segments in curve.figure["segments"]:
                for m in curve.figure["micro-batches"]:
                    row = {"curve": curve.name, "seed": seed, "segments": num_segments, "m": m}
                    yield row | _means(instance, num_segments, m)


def _instance(scenario: Scenario) -> Instance:
    return round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters))


def _means(instance: Instance, num_segments: int, m: int) -> Row:
    works, fits = [], 0
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


def _table(rows: Sequence[Row], column: str) -> tuple[list[int], list[int], np.ndarray]:
    """Each S, each m, and the mean over the networks: (sizes, counts)."""
    sizes, counts = distinct(rows, "segments"), distinct(rows, "m")
    seconds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        seconds.setdefault((row["segments"], row["m"]), []).append(row[column])
    times = [[np.mean(seconds[s, m]) for m in counts] for s in sizes]
    return sizes, counts, np.array(times)


def draw(rows: Sequence[Row]) -> Figure:
    """One heat map for each way to count the time; the best cell is marked, what memory refuses is crossed out."""
    from matplotlib.colors import LogNorm

    figure, axes = style.figure(13, 4, columns=3)
    for axis, (column, title) in zip(axes, _TIMES, strict=True):
        sizes, counts, table = _table(rows, column)
        image = axis.imshow(table, aspect="auto", origin="lower", cmap=style.HEAT, norm=LogNorm())
        for i, size in enumerate(sizes):
            if any(row["fits"] < 1 for row in select(rows, segments=size)):
                axis.text(len(counts) / 2 - 0.5, i, "over the memory of some devices (C7)", ha="center", va="center",
                          fontsize=7, color="white", bbox={"color": "0.2", "pad": 1.5})  # fmt: skip
        best = np.unravel_index(int(np.argmin(table)), table.shape)
        axis.plot(best[1], best[0], marker="*", markersize=13, color="white", markeredgecolor="black")
        axis.set_xticks(range(len(counts)), [str(m) for m in counts], fontsize=8)
        axis.set_yticks(range(len(sizes)), [str(s) for s in sizes])
        style.label(axis, "micro-batches m", "segments S", title)
        axis.grid(visible=False)
        figure.colorbar(image, ax=axis, label="one step [s]")
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """The best S and m, and how little the numbers of segments beside the best one lose."""
    best_sizes, size_changes = [], []
    for column, title in _TIMES:
        sizes, counts, table = _table(rows, column)
        i, j = np.unravel_index(int(np.argmin(table)), table.shape)
        best_sizes.append(f"{title}: S = {sizes[i]}, m = {counts[j]}, {table[i, j]:.0f} s")
        mean, spread = mean_spread(_more_segments(rows, column))
        size_changes.append(f"{title}: {mean:+.1f} ± {spread:.1f} %")
    return [
        PaperFinding(
            what="best S and m of an even split",
            paper="there is one",
            ours="; ".join(best_sizes),
            why="S and m both have an optimum inside the grid: an even split gives a further device, slower than all "
            "before it, as much as these, and a further micro-batch pays its fixed cost; where it lies depends on the "
            "network, which the paper does not print in full",
        ),
        PaperFinding(
            what=f"S = {_SIZES[1]} against S = {_SIZES[0]}, each network with its best m",
            paper="-",
            ours="; ".join(size_changes),
            why="on average the optimum is flat; a single network may gain or lose much by more segments",
        ),
    ]


def _more_segments(rows: Sequence[Row], column: str) -> list[float]:
    """By network: change of the time from fewer segments to more [%]."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        seconds.setdefault((row["seed"], row["segments"]), []).append(row[column])
    changes = []
    for seed in distinct(rows, "seed"):
        few, many = (min(seconds[seed, size]) for size in _SIZES)
        changes.append(100 * (many - few) / few)
    return changes


EXPERIMENT = Experiment(
    name="fig4", shows="time of a step over S and m, even split", run=run, draw=draw, findings=findings
)
