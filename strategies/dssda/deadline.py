"""The round for a given deadline T, where everything separates by cluster, channel and S.

An option is a triple (cluster n, channel j, S). Its cost under the deadline is

    g(T) = wS S + wS2 S^2 + min { q(p) : steps D_n(S) + t_up(p) <= T,  C6, C8, eps_max },

and the round is F(T) = V T + the cheapest matching under the costs min_S g(T). As :mod:`strategies.dssda.power`
proves, q is convex in the upload time as far as it falls; so g is convex in T, falls and then stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Cluster, Instance
from strategies.dssda.matching import Matching, match_channels
from strategies.dssda.power import Uplinks, first_true

Index = NDArray[np.intp]


@dataclass(frozen=True)
class Options:
    """Options as columns of one length, sorted by cluster, channel and pipeline time."""

    cluster: Index
    channel: Index
    segments: Index
    """S."""
    size_cost: Array
    """The term wS S + wS2 S^2."""
    pipeline_s: Array
    """Local steps times D_n(S) [s]."""
    uplinks: Uplinks
    best: Array
    """Efficiency x of the cheapest power when time does not matter."""
    earliest: Array
    """Least deadline that the option can meet [s]."""
    skip: Array
    """(N,), cost of each cluster without a channel."""
    num_channels: int

    @classmethod
    def of(cls, instance: Instance, choices: Sequence[Mapping[int, SegmentChoice]], uplinks: Uplinks) -> Options:
        """All options that some power allows, but for S that cost no less and take no less time than another S.

        Parameters
        ----------
        choices : (N,), for each cluster its segments by S; empty if it has none
        uplinks : (N, J)
        """
        sizes = [(n, *entry) for n, by_size in enumerate(choices) for entry in _front(instance.clusters[n], by_size)]
        of_cluster = np.array([n for n, *_ in sizes], dtype=np.intp)
        entry, channel = np.nonzero(uplinks.feasible[of_cluster])
        order = np.lexsort((entry, channel, of_cluster[entry]))
        entry, channel = entry[order], channel[order]
        cluster = of_cluster[entry]
        columns = uplinks.select(cluster, channel)
        pipeline = instance.steps * np.array([choice.pipeline_s for *_, choice in sizes])[entry]
        return cls(
            cluster=cluster,
            channel=channel,
            segments=np.array([choice.num_segments for *_, choice in sizes], dtype=np.intp)[entry],
            size_cost=np.array([cost for _, cost, _ in sizes])[entry],
            pipeline_s=pipeline,
            uplinks=columns,
            best=uplinks.cheapest()[cluster, channel],
            earliest=pipeline + columns.seconds(columns.high),
            skip=np.array([c.skip for c in instance.clusters], dtype=np.float64),
            num_channels=instance.num_channels,
        )

    def select(self, rows: Index | NDArray[np.bool_]) -> Options:
        """Some of the options, in the same order."""
        picked = {
            name: getattr(self, name)[rows]
            for name in ("cluster", "channel", "segments", "size_cost", "pipeline_s", "best", "earliest")
        }
        return replace(self, uplinks=self.uplinks.select(rows), **picked)

    def efficiency(self, deadline: float | Array) -> Array:
        """Efficiency x of the cheapest power that meets the deadline, where one does."""
        least = self.uplinks.efficiency(deadline - self.pipeline_s)
        return np.minimum(np.maximum(least, self.best), self.uplinks.high)

    def costs(self, deadline: float) -> Array:
        """Each option's g(T); inf before its earliest deadline."""
        costs = self.size_cost + self.uplinks.cost(self.efficiency(deadline))
        return np.where(self.earliest <= deadline, costs, np.inf)

    def slopes(self, deadline: float | Array) -> Array:
        """Each option's g'(T), from the right at the earliest deadline."""
        x = self.efficiency(deadline)
        return np.where(x > self.best, np.minimum(self.uplinks.slope_in_time(x), 0.0), 0.0)

    def tangents(self, deadline: float, ends: tuple[float, float]) -> tuple[Array, Array]:
        """Each option's tangent at the deadline, or at its earliest one if that is later, at two other deadlines.

        g is convex: no option costs less than its tangent anywhere.
        """
        touch = np.maximum(deadline, self.earliest)
        at_touch = self.size_cost + self.uplinks.cost(self.efficiency(touch))
        slope = self.slopes(touch)
        return at_touch + slope * (ends[0] - touch), at_touch + slope * (ends[1] - touch)

    def match(self, costs: Array) -> Matching | None:
        """Cheapest matching of min(N, J) clusters when each pair takes its cheapest option; None if there is none."""
        table = np.full((len(self.skip), self.num_channels), np.inf)
        table[self.cluster[self._starts], self.channel[self._starts]] = self.least(costs)
        return match_channels(table, self.skip)

    def taken(self, matching: Matching, costs: Array) -> Options:
        """Cheapest option of each matched pair."""
        pairs = [n * self.num_channels + j for n, j in enumerate(matching.channel_of) if j is not None]
        pair = self.cluster * self.num_channels + self.channel
        begins, ends = np.searchsorted(pair, pairs), np.searchsorted(pair, pairs, side="right")
        rows = [begin + np.argmin(costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        return self.select(np.array(rows, dtype=np.intp))

    def least(self, costs: Array) -> Array:
        """Least cost among the options of each pair that has any, in order."""
        return np.minimum.reduceat(costs, self._starts) if len(costs) else costs

    def useful(self, first: float, last: float) -> Options:
        """Without the options that begin at ``last`` or later, or cost more than another of their pair all the way."""
        at_last = np.where(self.earliest < last, self.costs(last), np.inf)
        at_first = self.least(self.costs(first))
        # Costs that only stay the same must not fall out by rounding.
        limit = at_first + 1e-12 * np.abs(at_first)
        limit = np.repeat(limit, np.diff(np.append(self._starts, len(self.cluster))))
        return self.select(np.isfinite(at_last) & (at_last <= limit))

    def least_deadline(self) -> float:
        """Least deadline that min(N, J) clusters can meet, by bisection among the earliest deadlines of the options."""
        deadlines = np.unique(self.earliest)
        low, high = 0, len(deadlines) - 1
        while low < high:
            middle = (low + high) // 2
            possible = self.match(np.where(self.earliest <= deadlines[middle], 0.0, np.inf)) is not None
            low, high = (low, middle) if possible else (middle + 1, high)
        return float(deadlines[low])

    def total(self, deadline: float) -> float:
        """Cost of an assignment that takes all these options, one a cluster: their g(T) and the others' ``skip``."""
        unmatched = np.ones(len(self.skip), dtype=bool)
        unmatched[self.cluster] = False
        return float(np.sum(self.costs(deadline)) + np.sum(self.skip[unmatched]))

    def best_deadline(self, weight: float) -> float:
        """Deadline of least weight T + :meth:`total`, a convex function, by bisection of its slope.

        Parameters
        ----------
        weight : V > 0 [1/s]
        """
        first = float(np.max(self.earliest))
        settled = float(np.max(self.pipeline_s + self.uplinks.seconds(self.best)))
        # Beyond it even the whole fall of the costs does not pay for the time.
        last = first + (self.total(first) - self.total(np.inf)) / weight

        def rises(deadline: Array) -> NDArray[np.bool_]:
            return np.asarray(weight + np.sum(self.slopes(deadline)) >= 0)

        return float(first_true(rises, np.asarray(first), np.asarray(max(first, min(settled, last)))))

    @cached_property
    def _starts(self) -> Index:
        """Where the options of each pair that has any begin."""
        begins = np.diff(self.cluster * self.num_channels + self.channel, prepend=-1) != 0
        return np.flatnonzero(begins)


def _front(cluster: Cluster, choices: Mapping[int, SegmentChoice]) -> list[tuple[float, SegmentChoice]]:
    """Costs of S with their segments, faster ones first, without those that cost no less than a faster one."""
    front: list[tuple[float, SegmentChoice]] = []
    for size, choice in sorted(choices.items(), key=lambda item: (item[1].pipeline_s, cluster.size_cost(item[0]))):
        cost = cluster.size_cost(size)
        if not front or cost < front[-1][0]:
            front.append((cost, choice))
    return front
