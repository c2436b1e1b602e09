"""Computation time against baselines at their best: S and m tuned for each, VanillaFL's shares by speed.

Figs. 7 and 8 give every baseline m = 8, as the paper prints none. Here each gets the S and m of least Eq. (15), as
DSSDA's segments have, in the first round of a network: queues are empty, and a cluster's own delay is all that counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, even_parts, whole_blocks
from client_pipeline.system.channels import NetworkTrace
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread, networks
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import exceeds, pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.dssda.segments import solve_segments
from strategies.planning.costs import pipeline_work
from strategies.planning.segment_rules import plan_on_fastest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OURS = "DSSDA"
_METHODS = {
    "even splits, S and m tuned": "-18.33 %",
    "TITANIC, S and m tuned": "-18.94 %",
    "VanillaFL, shares by speed": "-15.09 %",
    "VanillaFL, shares by speed, gradients exchanged": "-15.09 %",
}
"""By method: what the paper publishes of the untuned one."""
_WHY = {
    "even splits, S and m tuned": "even parts on the S fastest devices, S and m of least Eq. (15)",
    "TITANIC, S and m tuned": "parts in proportion to speed on the S fastest devices, S and m of least Eq. (15)",
    "VanillaFL, shares by speed": "every device trains the whole model on the share that ends with the others'; memory "
    "(C7) is waived for it: no device has room for the model",
    "VanillaFL, shares by speed, gradients exchanged": "the same, and a ring of all devices averages what a round "
    "uploads after every step, over the links of the cluster",
}


def proportional_parts(num_blocks: int, speed: Sequence[float], caps: Sequence[int]) -> list[int] | None:
    """Parts in proportion to speed, from 1 to what memory holds, by the largest remainder; None if that is too little.

    Parameters
    ----------
    num_blocks : L
    speed : of the devices, (S,)
    caps : TEBs that each holds, (S,)
    """
    if sum(caps) < num_blocks or min(caps) < 1:
        return None
    quota = np.asarray(speed) * num_blocks / sum(speed)
    parts = np.clip(np.floor(quota), 1, caps).astype(int)
    while (missing := num_blocks - int(parts.sum())) != 0:
        step = 1 if missing > 0 else -1
        possible = parts < np.asarray(caps) if step > 0 else parts > 1
        parts[int(np.argmax(np.where(possible, step * (quota - parts), -np.inf)))] += step
    return [int(part) for part in parts]


def tuned_plan(instance: Instance, cluster: int, parts_of: Callable[[int], list[int] | None]) -> ClusterPlan | None:
    """Return the plan of least Eq. (15) over S and m, with parts on the S fastest devices; None if none fits C7."""
    eq15, memory = replace(instance, latency="eq15"), instance.device_arrays(cluster).mem
    best, least = None, math.inf
    for size in instance.segment_range(cluster):
        parts = parts_of(size)
        for m in instance.m_set if parts is not None else ():
            assert parts is not None
            plan = plan_on_fastest(instance, cluster, parts, m)
            if any(exceeds(d * instance.gamma0, float(memory[k])) for k, d in enumerate(plan.delta)):
                break
            seconds = pipeline_seconds(eq15, cluster, plan.delta, m, None)
            if seconds < least:
                best, least = plan, seconds
    return best


def shared_batch_seconds(instance: Instance, cluster: int) -> float:
    """Seconds of a step in which each device trains the whole model on a share of whole samples that fits its speed.

    The least T for which the devices together have time for b samples:
    sum over k of floor((T v_k / L - o_b) / o_f) >= b, with o_b inside the sample where it counts per sample.
    """
    devices = instance.device_arrays(cluster)
    speed = devices.phi * devices.f
    per_sample = instance.o_f + (instance.o_b if instance.o_b_scaling == "sample" else 0.0)
    once = 0.0 if instance.o_b_scaling == "sample" else instance.o_b
    # A device that takes i samples needs so long: the b-th smallest of all these times is T.
    samples = np.arange(1, instance.b + 1)[:, None]
    times = instance.L * ((samples * per_sample + once) / speed + instance.t0 + devices.t0)
    return float(np.sort(times.ravel())[instance.b - 1])


def all_reduce_seconds(instance: Instance, cluster: int) -> float:
    """Seconds of a ring all-reduce of what a round uploads, over the slowest of the cluster's links."""
    devices = instance.device_arrays(cluster)
    num_devices = len(devices.rate)
    return float(2 * (num_devices - 1) / num_devices * instance.clusters[cluster].up.e_bits / devices.rate.min())


def _tuned_plans(instance: Instance, n: int, choice: SegmentChoice) -> dict[str, ClusterPlan | None]:
    """Plans of the pipelines among the methods: DSSDA's own choice, and the tuned ones."""
    devices = instance.device_arrays(n)
    speed = devices.phi * devices.f
    fastest = np.argsort(-speed, kind="stable")
    caps = [whole_blocks(memory, instance.gamma0, instance.L) for memory in devices.mem]

    def by_speed(size: int) -> list[int] | None:
        chosen = fastest[:size]
        return proportional_parts(instance.L, speed[chosen].tolist(), [caps[k] for k in chosen])

    return {
        _OURS: ClusterPlan(delta=choice.delta, order=choice.order(speed), m=choice.m),
        "even splits, S and m tuned": tuned_plan(instance, n, lambda size: even_parts(instance.L, size)),
        "TITANIC, S and m tuned": tuned_plan(instance, n, by_speed),
    }


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each network and method: mean over the clusters."""
    del folder
    for curve in curves:
        say(f"{curve.name}: {curve.seeds} networks")
        for seed, scenario in networks(curve):
            instance = round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters))
            choices = [part.choice for part in solve_segments(instance).clusters]
            times: dict[str, list[tuple[float, float]]] = {_OURS: [], **{name: [] for name in _METHODS}}
            for n, choice in enumerate(choices):
                if choice is None:
                    continue
                plans = _tuned_plans(instance, n, choice)
                for name, plan in plans.items():
                    if plan is not None:
                        work = pipeline_work(instance, n, plan)
                        times[name].append((work.pipeline_eq15_s, work.pipeline_s))
                shared_s, exchange_s = shared_batch_seconds(instance, n), all_reduce_seconds(instance, n)
                times["VanillaFL, shares by speed"].append((shared_s, shared_s))
                times["VanillaFL, shares by speed, gradients exchanged"].append((shared_s + exchange_s,) * 2)
            for name, of_clusters in times.items():
                # Where one cluster has no such plan, the method has no step of the network.
                if len(of_clusters) == len(choices):
                    eq15_s, gpipe_s = np.mean(of_clusters, axis=0)
                    yield {
                        "curve": curve.name,
                        "label": curve.label,
                        "seed": seed,
                        "method": name,
                        "eq15_s": float(eq15_s),
                        "gpipe_s": float(gpipe_s),
                    }


def draw(rows: Sequence[Row]) -> Figure:
    """Step time of each method, event-simulated, one panel a model."""
    curves = distinct(rows, "curve")
    figure, axes = style.figure(12, 4.4, columns=len(curves))
    for axis, name in zip(axes, curves, strict=True):
        curve_rows = select(rows, curve=name)
        methods = distinct(curve_rows, "method")
        means, spreads = zip(
            *(mean_spread([r["gpipe_s"] for r in select(curve_rows, method=method)]) for method in methods),
            strict=True,
        )
        style.bars(axis, methods, means, spreads)
        style.label(axis, "", f"step, event-simulated [s]: {curve_rows[0]['label']}")
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """DSSDA's step against each method's, network by network, with paired tests corrected by Holm."""
    compared = [(name, method, _changes(rows, name, method)) for name in distinct(rows, "curve") for method in _METHODS]
    known = [(name, method, changes) for name, method, changes in compared if changes]
    p_values = holm([_p_value(changes) for _, _, changes in known])
    paper_findings = []
    for (name, method, changes), p_value in zip(known, p_values, strict=True):
        mean, spread = mean_spread(changes)
        paper_findings.append(
            PaperFinding(
                what=f"{select(rows, curve=name)[0]['label']}: step of DSSDA against {method}",
                paper=_METHODS[method],
                ours=f"{mean:+.1f} ± {spread:.1f} %; slower in {sum(c > 0 for c in changes)} of {len(changes)} "
                f"networks; p = {p_value:.1g}",
                why=_WHY[method],
            )
        )
    return paper_findings


def _changes(rows: Sequence[Row], name: str, method: str) -> list[float]:
    """By network: by how many per cent DSSDA's step is longer, event-simulated."""
    curve_rows = select(rows, curve=name)
    of_dssda = {row["seed"]: row["gpipe_s"] for row in select(curve_rows, method=_OURS)}
    return [100 * (of_dssda[r["seed"]] / r["gpipe_s"] - 1) for r in select(curve_rows, method=method)]


def _p_value(changes: Sequence[float]) -> float:
    """Wilcoxon's signed-rank test of paired differences."""
    from scipy.stats import wilcoxon

    return float(wilcoxon(changes).pvalue) if any(changes) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values of several tests by Holm's steps, in their order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


EXPERIMENT = Experiment(
    name="tuned", shows="computation time against baselines with tuned S and m", run=run, draw=draw, findings=findings
)
