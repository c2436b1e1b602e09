"""Segments and micro-batches of a cluster, exact: the least pipeline time for each number of segments S."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from client_pipeline.system.energy import num_chunks
from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility, SegmentChoice
from strategies.dssda.closed_form_segments import choices_with_last, closed_form_choices
from strategies.dssda.evaluation import choice_cost
from strategies.dssda.flow_shop import flow_shop_choices
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits
from strategies.dssda.priced_choices import priced_choices
from strategies.dssda.unequal_tebs import unequal_choices


@dataclass(frozen=True)
class SegmentTable:
    """Choices of a cluster."""

    choices: Mapping[int, SegmentChoice]
    """By S: the segments of least pipeline time. An S that takes as long as a smaller one, and costs no less, may be
    absent."""
    infeasible: Infeasibility | None
    """Constraint that leaves no choice."""
    more: tuple[SegmentChoice, ...] = ()
    """All choices that may be best where the upload depends on m or joules have a price; else empty."""

    @property
    def offered(self) -> Sequence[SegmentChoice]:
        """All choices that may be the best of a round."""
        return self.more or tuple(self.choices.values())


def segment_table(instance: Instance, cluster: int) -> SegmentTable:
    """The choices of one cluster; for several, :func:`segment_tables` is faster."""
    return _tables(instance, [cluster])[0]


def segment_tables(instance: Instance) -> list[SegmentTable]:
    """The choices of all clusters, (N,)."""
    return _tables(instance, range(instance.num_clusters))


def solve_segments(instance: Instance) -> Answer:
    """Solve each cluster by itself: V steps D + wS S + wS2 S^2 and its joules, without channel, power and upload.

    Returns
    -------
    ``ClusterAnswer.cost`` holds a cluster's objective, ``objective`` their sum; ``latency_s`` is None.
    """
    answers, faults, total = [], [], 0.0
    for n, table in enumerate(segment_tables(instance)):
        if table.infeasible is not None:
            faults.append(table.infeasible)
            answers.append(ClusterAnswer("infeasible", False))
            continue

        costs = {c: instance.V * instance.steps * c.pipeline_s + choice_cost(instance, n, c) for c in table.offered}
        best = min(costs, key=lambda c: (costs[c], c.num_segments))  # noqa: B023
        least = costs[best]
        total += least
        answers.append(ClusterAnswer("optimal", True, choice=best, cost=least))
    if faults:
        return Answer("infeasible", tuple(answers), infeasible=tuple(faults))
    return Answer("optimal", tuple(answers), total, total)


def _tables(instance: Instance, clusters: list[int] | range) -> list[SegmentTable]:
    limits = [Limits.of(instance, n) for n in clusters]
    more: list[list[SegmentChoice]] = [[] for _ in limits]
    if instance.wJ:
        more = [priced_choices(instance, limit) for limit in limits]
    elif instance.m_decides_upload:
        # Fewer micro-batches send fewer activations up (Eq. 11): a slower pipeline may make a faster round.
        for m in instance.m_set:
            part = replace(instance, m_set=(m,))
            choices_of_m = _choices(part, [Limits.of(part, n) for n in clusters])
            for offered, choices in zip(more, choices_of_m, strict=True):
                offered += choices.values()
    return [
        SegmentTable(choices, None if choices else _infeasibility(instance, limit), tuple(offered))
        for choices, limit, offered in zip(_choices(instance, limits), limits, more, strict=True)
    ]


def _choices(instance: Instance, limits: Sequence[Limits]) -> list[dict[int, SegmentChoice]]:
    """The choices by S of several clusters."""
    if instance.teb_shares:
        return [unequal_choices(instance, limit) for limit in limits]
    if instance.latency != "eq15":
        return [flow_shop_choices(instance, limit) for limit in limits]
    return choices_with_last(instance, limits) if instance.names_last else closed_form_choices(instance, limits)


def _infeasibility(instance: Instance, limits: Limits) -> Infeasibility:
    """The constraint that leaves a cluster without segments, by how much, and what would help."""
    n, sizes = limits.cluster, instance.segment_range(limits.cluster)
    num_devices = len(limits.memory_cap)
    if not sizes:
        most = min(num_devices, instance.L)
        if most < instance.S_min:
            remedy = "lower S_min, or bring more devices or TEBs"
            return Infeasibility(n, "C2", float(instance.S_min), float(most), remedy)
        remedy = "S_min is above S_max; raise S_max or lower S_min"
        return Infeasibility(n, "C2", float(instance.S_min), float(instance.S_max or 0), remedy)

    def fits(cap: Array) -> float:
        """TEBs that the ``sizes[-1]`` roomiest devices hold."""
        return float(np.sort(cap)[::-1][: sizes[-1]].sum())

    def crew(cap: Array) -> float:
        return float((cap >= 1).sum())

    best_memory = fits(limits.memory_cap)
    if best_memory < instance.L or crew(limits.memory_cap) < sizes[0]:
        if best_memory < instance.L:
            remedy = f"{best_memory:g} TEBs fit; use more devices, more memory or smaller TEBs"
            return Infeasibility(n, "C7", float(instance.L), best_memory, remedy)
        remedy = f"{crew(limits.memory_cap):g} devices hold a TEB; lower S_min or add memory"
        return Infeasibility(n, "C7", float(sizes[0]), crew(limits.memory_cap), remedy)
    best = max(limits.largest_caps(), key=lambda cap: (fits(cap), crew(cap)))
    m = instance.m_set[-1]
    chunks = float(num_chunks(instance.energy, m))
    remedy = (
        f"{fits(best):g} TEBs on {crew(best):g} devices stay within the energy budgets, at the best m "
        f"(m = {m}: {chunks:g} chunks count); raise Emax, slow the devices or use more of them"
    )
    if fits(best) < instance.L:
        return Infeasibility(n, "C9", float(instance.L), fits(best), remedy)
    return Infeasibility(n, "C9", float(sizes[0]), crew(best), remedy)
