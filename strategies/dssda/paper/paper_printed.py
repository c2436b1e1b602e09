"""Algorithms 2 to 4 of one round with the printed order of steps, arXiv:2509.19855v1: drift (32) and C11 together.

Where ``paper.py`` mends, this follows the text: it starts at S = 1, Algorithm 2 alternates between
segments for the m so far (39) and the m of these segments (38) and takes whatever that ends in, and every repetition
moves the queues by (29), with C11 in (39) and (42), which is what lets them come to rest.

Where it does not follow the text: b for the S of (33) to (39), without which there are never more than 4.5
micro-batches (``micro_batches``); the fewest segments that fit where one device
cannot hold all TEBs (C7, C9); a cluster's own Y_n for the sum over all clusters in (39), for S_n is its own; the
integer programme solved exactly; the missing parenthesis of (41) after the delay; C8 and C11 as intervals of the power,
where (43) is an outer approximation; the lambda that stationarity needs, as (42) defines none. A control unit without a
channel has no power in (28): its Y_n stays. The queues of the next round are moved once, by what this round had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, SegmentChoice
from strategies.dssda.convergence import gamma
from strategies.dssda.instance import Instance
from strategies.dssda.paper.paper import PaperDecision, PaperRound
from strategies.dssda.paper.paper_segments import best_micro_batches
from strategies.dssda.per_round_bound import PerRoundBound
from strategies.dssda.segments import segment_table

_REST = 1e-9
"""Change of a queue, as a share of it and 1, below which it has stabilised."""


@dataclass(frozen=True)
class PrintedRound:
    """Result of the printed algorithms."""

    answer: Answer
    queues: tuple[float, ...]
    """Y_n inside the algorithms when they stopped, (N,)."""
    iterations: int
    """Iterations of Algorithm 4."""
    status: Literal["stable", "stopped", "infeasible"]
    """``stopped``: the limit of iterations came before the queues were stable."""


def plan_round_printed(instance: Instance, bound: PerRoundBound, *, max_iterations: int = 50) -> PrintedRound:
    """Plan one round as printed.

    Parameters
    ----------
    instance : with the weights of the printed drift, wS = wP = Y
    bound : C11
    max_iterations : of each of the three loops
    """
    return _Printed(instance, bound, max_iterations).plan()


class _Printed:
    def __init__(self, instance: Instance, bound: PerRoundBound, max_iterations: int) -> None:
        self._instance, self._bound, self._most = instance, bound, max_iterations
        self._queues = np.array([cluster.wS for cluster in instance.clusters])

    def plan(self) -> PrintedRound:
        """Algorithm 4."""
        choices = [first_choice(self._instance, n) for n in range(self._instance.num_clusters)]
        # Start: powers as large as allowed.
        num_clusters = self._instance.num_clusters
        sizes = tuple(None if choice is None else choice.num_segments for choice in choices)
        nobody = PaperDecision(sizes, (None,) * num_clusters, np.full(num_clusters, np.inf))
        decision = self._round(choices).match(nobody)
        if decision is None:
            return PrintedRound(self._round(choices).infeasible(), tuple(self._queues.tolist()), 0, "infeasible")
        for iteration in range(1, self._most + 1):
            before = self._queues.copy()
            # Step 1: Lambda by Algorithm 2, Upsilon by Algorithm 3.
            choices = [self._schedule(n, choice, decision) for n, choice in enumerate(choices)]
            decision = self._allocate(choices, decision)
            # Step 2: the queues by (29), until they are stable.
            self._move_queues(choices, decision)
            if _stable(before, self._queues):
                return self._ended(choices, decision, iteration, "stable")
        return self._ended(choices, decision, self._most, "stopped")

    def _schedule(self, n: int, choice: SegmentChoice | None, decision: PaperDecision) -> SegmentChoice | None:
        """Algorithm 2 for one cluster: (39), (38) and (29) until neither segments nor queue change."""
        if choice is None:
            return None
        distortion = self._distortion(n, decision)
        for _ in range(self._most):
            before, queue = choice, self._queues[n].copy()
            instance = self._weighted()
            # Step 1: segments for this m, by (39) under C11.
            table = segment_table(replace(instance, m_set=(choice.m,)), n).choices
            allowed = [c for c in table.values() if self._keeps_c11(c.num_segments, distortion)]
            if allowed:
                choice = min(allowed, key=lambda c: (_cost(instance, n, c), c.num_segments))
            # Step 2: m for these segments, by (38).
            choice = best_micro_batches(instance, n, choice)
            # Step 3: the queue, by (29).
            if decision.channels[n] is not None:
                self._queues[n] = self._moved(n, choice.num_segments, distortion)
            if choice == before and _stable(queue, self._queues[n]):
                break
        return choice

    def _allocate(self, choices: Sequence[SegmentChoice | None], decision: PaperDecision) -> PaperDecision:
        """Algorithm 3: channels by (41), powers by (42), queues by (29) until these are stable."""
        decision = decision._replace(sizes=tuple(None if c is None else c.num_segments for c in choices))
        for _ in range(self._most):
            before = self._queues.copy()
            round_ = self._round(choices)
            matched = round_.match(decision)
            if matched is None:
                break
            decision, _powers = round_.allocate_power(matched)
            self._move_queues(choices, decision)
            if _stable(before, self._queues):
                break
        return decision

    def _move_queues(self, choices: Sequence[SegmentChoice | None], decision: PaperDecision) -> None:
        for n, choice in enumerate(choices):
            if choice is not None and decision.channels[n] is not None:
                self._queues[n] = self._moved(n, choice.num_segments, self._distortion(n, decision))

    def _moved(self, n: int, size: int, distortion: float) -> float:
        """Y_n by (29)."""
        now = float(gamma(size, self._instance.L, distortion, self._bound.parameters))
        return max(float(self._queues[n]) + now - self._bound.gamma_max, 0.0)

    def _keeps_c11(self, size: int, distortion: float) -> bool:
        # Rounding must not forbid the power that C11 itself set.
        return distortion <= self._bound.distortion_left(size, self._instance.L) * (1 + 1e-9)

    def _distortion(self, n: int, decision: PaperDecision) -> float:
        """Distortion at a cluster's power so far; without a channel, at its largest power on its best one."""
        channel = decision.channels[n]
        if channel is None:
            return float(self._round([None] * self._instance.num_clusters).least_distortion()[n])
        return float(self._instance.distortion(n, decision.power_w[n], channel))

    def _weighted(self) -> Instance:
        """The problem with the queues so far."""
        pairs = zip(self._instance.clusters, self._queues.tolist(), strict=True)
        return replace(self._instance, clusters=tuple(replace(c, wS=y, wP=y) for c, y in pairs))

    def _round(self, choices: Sequence[SegmentChoice | None]) -> PaperRound:
        tables = [{} if choice is None else {choice.num_segments: choice} for choice in choices]
        return PaperRound(self._weighted(), self._bound, tables)

    def _ended(
        self,
        choices: Sequence[SegmentChoice | None],
        decision: PaperDecision,
        iterations: int,
        status: Literal["stable", "stopped"],
    ) -> PrintedRound:
        tables = [{} if choice is None else {choice.num_segments: choice} for choice in choices]
        # The cost that is reported is that of the round's own queues, as for every other planner.
        answer = PaperRound(self._instance, self._bound, tables).score(decision)
        return PrintedRound(answer, tuple(self._queues.tolist()), iterations, status)


def first_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """Start of Algorithm 2: S = 1, or the fewest segments that fit, on the devices of the least bottleneck.

    The initial m is not printed. It is that of these segments, by (38); one segment has nothing to overlap: m = 1.
    """
    table = segment_table(instance, cluster).choices
    if not table:
        return None
    return best_micro_batches(instance, cluster, table[min(table)])


def _cost(instance: Instance, n: int, choice: SegmentChoice) -> float:
    return instance.V * instance.steps * choice.pipeline_s + instance.clusters[n].size_cost(choice.num_segments)


def _stable(before: Array, after: Array) -> bool:
    return bool(np.all(np.abs(after - before) <= _REST * (1.0 + np.abs(before))))
