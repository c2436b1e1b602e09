"""The round for a given deadline T, where everything separates by cluster, channel and S.

An option is a triple (cluster n, channel j, S); where the activations that go up depend on the number m of
micro-batches, S stands for a pair (S, m). Its cost under the deadline is

    g(T) = wS S + wS2 S^2 + min { q(p) : steps D_n(S) + t_up(p) <= T,  C6, C8, eps_max },

and the round is F(T) = V T + the cheapest matching under the costs min_S g(T). As :mod:`strategies.dssda.power`
proves, q is convex in the upload time as far as it falls; so g is convex in T, falls and then stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import choice_cost
from strategies.dssda.instance import Instance
from strategies.dssda.matching import most_matched
from strategies.dssda.power import Uplinks, first_true_number
from strategies.dssda.prices import PricedMatching, match_at_prices

Index = NDArray[np.intp]
_HALVINGS, _FEW_OPTIONS = 4, 64
"""Halvings of a deadline that are tried at once, and options up to which that takes less time than one by one."""


@dataclass(frozen=True)
class ClusterSizes:
    """The S of all clusters as columns, sorted by cluster and pipeline time."""

    first: Index
    """(N + 1,), where the entries of each cluster begin, and where the last one's end."""
    choices: tuple[SegmentChoice, ...]
    cost: Array
    """The term wS S + wS2 S^2 and the devices' joules times wJ."""
    pipeline_s: Array
    """Local steps times D_n(S) [s]."""
    bits: Array
    """Bits that go up beside those of :class:`strategies.dssda.power.Uplinks`, because of the choice's m."""

    @classmethod
    def of(cls, instance: Instance, choices: Sequence[Iterable[SegmentChoice]]) -> ClusterSizes:
        """Collect them, without those of a cluster that are no better in cost, time or bits than another one.

        Parameters
        ----------
        choices : (N,), of each cluster
        """
        first, entries = [0], list[tuple[float, float, float, SegmentChoice]]()
        for n, offered in enumerate(choices):
            kept: list[tuple[float, float]] = []
            by_time = []
            for c in offered:
                bits = float(instance.activation_bits(c.m)) if instance.m_decides_upload else 0.0
                by_time.append((c.pipeline_s, choice_cost(instance, n, c), bits, c.num_segments, c))
            for pipeline_s, cost, bits, _, choice in sorted(by_time, key=lambda entry: entry[:4]):
                if not any(other <= cost and fewer <= bits for other, fewer in kept):
                    # Of equal bits the last one kept costs least.
                    kept = [*kept, (cost, bits)] if instance.m_decides_upload else [(cost, bits)]
                    entries.append((cost, instance.steps * pipeline_s, bits, choice))
            first.append(len(entries))
        return cls(
            first=np.array(first, dtype=np.intp),
            choices=tuple(choice for *_, choice in entries),
            cost=np.array([cost for cost, *_ in entries], dtype=np.float64),
            pipeline_s=np.array([pipeline_s for _, pipeline_s, *_ in entries], dtype=np.float64),
            bits=np.array([bits for *_, bits, _ in entries], dtype=np.float64),
        )


@dataclass(frozen=True)
class Options:
    """Options as columns of one length, sorted by cluster, channel and pipeline time."""

    pair: Index
    """Cluster and channel: n J + j."""
    entry: Index
    """Place among the segments of all clusters."""
    row: Index
    """Place among the uplinks: the pair's, or one of the pair's several, where a band is divided."""
    earliest: Array
    """Least deadline that the option can meet [s]."""
    settled: Array
    """Least deadline from which on its cost stays the same [s]."""
    settled_cost: Array
    """The cost from there on."""
    sizes: ClusterSizes
    pairs: Uplinks
    """(N J Q,), the Q uplinks of every pair; Q = 1 unless a band is divided."""
    rent: Array
    """(N J Q,), what the band of each uplink costs."""
    cheapest: Array
    """(N J Q,), efficiency x of each uplink's cheapest power when time does not matter."""
    skip: Array
    """(N,), cost of each cluster without a channel."""
    num_channels: int

    @classmethod
    def of(
        cls,
        instance: Instance,
        choices: Sequence[Iterable[SegmentChoice]],
        uplinks: Uplinks,
        rent: Array | None = None,
    ) -> Options:
        """All options that some power allows, but for those that are no better in anything than another one.

        Parameters
        ----------
        choices : (N,), for each cluster its segments; empty if it has none
        uplinks : (N, J), or (N, J, Q) with several bands for each pair; without the bits that depend on m
        rent : of the uplinks' shape, what the band of each costs; nothing if None
        """
        sizes = ClusterSizes.of(instance, choices)
        pairs, cheapest = uplinks.flat(), uplinks.cheapest().ravel()
        rents = np.zeros(len(cheapest)) if rent is None else rent.ravel()
        per_pair = len(cheapest) // (instance.num_clusters * instance.num_channels)
        possible = np.flatnonzero(pairs.feasible)
        clusters = possible // (instance.num_channels * per_pair)
        first, end = sizes.first[clusters], sizes.first[clusters + 1]
        place = np.repeat(np.arange(len(possible)), end - first)
        entry = first[place] + np.arange(len(place)) - np.searchsorted(place, place)
        row = possible[place]
        pipeline, bits = sizes.pipeline_s[entry], sizes.bits[entry]
        sending = _sending(pairs, row, bits) if np.any(bits) else None

        def upload_seconds(efficiency: Array) -> Array:
            # Of options that share an uplink once, where they send as much.
            return pairs.seconds(efficiency)[row] if sending is None else sending.seconds(efficiency[row])

        return cls(
            pair=row // per_pair,
            entry=entry,
            row=row,
            earliest=pipeline + upload_seconds(pairs.high),
            settled=pipeline + upload_seconds(cheapest),
            settled_cost=sizes.cost[entry] + rents[row] + pairs.cost(cheapest)[row],
            sizes=sizes,
            pairs=pairs,
            rent=rents,
            cheapest=cheapest,
            skip=np.array([c.skip for c in instance.clusters], dtype=np.float64),
            num_channels=instance.num_channels,
        )

    @property
    def cluster(self) -> Index:
        """Cluster n of each option."""
        return self.pair // self.num_channels

    @property
    def channel(self) -> Index:
        """Channel j of each option."""
        return self.pair % self.num_channels

    @property
    def choices(self) -> list[SegmentChoice]:
        """Segments of each option."""
        return [self.sizes.choices[entry] for entry in self.entry]

    @cached_property
    def pipeline_s(self) -> Array:
        """Local steps times D_n(S) of each option [s]."""
        return self.sizes.pipeline_s[self.entry]

    @cached_property
    def uplinks(self) -> Uplinks:
        """The uplink of each option."""
        return _sending(self.pairs, self.row, self.sizes.bits[self.entry])

    def select(self, rows: Index | NDArray[np.bool_]) -> Options:
        """Some of the options, in the same order."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows  # several columns: faster than by the mask
        columns = ("pair", "entry", "row", "earliest", "settled", "settled_cost")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def efficiency(self, deadline: float | Array) -> Array:
        """Efficiency x of the cheapest power that meets the deadline, where one does."""
        uplinks = self.uplinks
        least = uplinks.efficiency(deadline - self.pipeline_s)
        return np.minimum(np.maximum(least, self._unhurried), uplinks.high)

    def costs(self, deadline: float) -> Array:
        """Each option's g(T); inf before its earliest deadline."""
        costs = np.where(self.earliest <= deadline, self.settled_cost, np.inf)
        hurried = np.flatnonzero((self.earliest <= deadline) & (deadline < self.settled))
        if len(hurried):
            costs[hurried] = self.select(hurried)._hurried_cost(deadline)
        return costs

    def slopes(self, deadline: float | Array) -> Array:
        """Each option's g'(T), from the right at the earliest deadline."""
        x, uplinks = self.efficiency(deadline), self.uplinks
        return np.where(x > self._unhurried, np.minimum(uplinks.slope_in_time(x), 0.0), 0.0)

    def tangents(self, deadline: float, ends: tuple[float, float]) -> tuple[Array, Array]:
        """Each option's tangent at the deadline, or at its earliest one if that is later, at two other deadlines.

        g is convex: no option costs less than its tangent anywhere.
        """
        touch = np.maximum(deadline, self.earliest)
        at_first, at_last = self.settled_cost.copy(), self.settled_cost.copy()
        hurried = np.flatnonzero(touch < self.settled)
        some, touch = self.select(hurried), touch[hurried]
        at_touch, slope = some._hurried_cost(touch), some.slopes(touch)
        at_first[hurried] = at_touch + slope * (ends[0] - touch)
        at_last[hurried] = at_touch + slope * (ends[1] - touch)
        return at_first, at_last

    def _hurried_cost(self, deadline: float | Array) -> Array:
        """Each option's g(T) at a deadline that it can meet."""
        return self.sizes.cost[self.entry] + self.rent[self.row] + self.uplinks.cost(self.efficiency(deadline))

    def match(self, costs: Array, prices: Array | None = None) -> PricedMatching | None:
        """Cheapest matching of min(N, J) clusters when each pair takes its cheapest option; None if there is none."""
        return match_at_prices(self.table(costs), self.skip, prices)

    def table(self, costs: Array) -> Array:
        """Least cost among the options of each pair, (N, J); inf where there is none."""
        table = np.full((len(self.skip), self.num_channels), np.inf)
        table.ravel()[self.pair[self._starts]] = self.least(costs)
        return table

    def taken(self, cheapest: PricedMatching, costs: Array) -> Options:
        """Cheapest option of each matched pair."""
        pairs = [n * self.num_channels + j for n, j in enumerate(cheapest.matching.channel_of) if j is not None]
        begins, ends = np.searchsorted(self.pair, pairs), np.searchsorted(self.pair, pairs, side="right")
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
        limit = np.repeat(limit, np.diff(np.append(self._starts, len(self.pair))))
        return self.select(np.isfinite(at_last) & (at_last <= limit))

    def least_deadline(self) -> float:
        """Least deadline that min(N, J) clusters can meet, by bisection among the earliest deadlines of the pairs."""
        earliest = self.table(self.earliest)
        deadlines = np.unique(earliest[np.isfinite(earliest)])
        low, high = 0, len(deadlines) - 1
        while low < high:
            middle = (low + high) // 2
            possible = most_matched(earliest <= deadlines[middle]) == min(earliest.shape)
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
        settled = float(np.max(self.settled))
        # Beyond it even the whole fall of the costs does not pay for the time.
        last = first + (self.total(first) - self.total(np.inf)) / weight

        def rises(deadlines: Array) -> NDArray[np.bool_]:
            return np.asarray(weight + np.sum(self.slopes(deadlines[:, None]), axis=1) >= 0)

        halvings = _HALVINGS if len(self.pair) <= _FEW_OPTIONS else 1
        return first_true_number(rises, first, max(first, min(settled, last)), halvings)

    @cached_property
    def _unhurried(self) -> Array:
        """Efficiency x of each option's cheapest power when time does not matter."""
        return self.cheapest[self.row]

    @cached_property
    def _starts(self) -> Index:
        """First place of the options of each pair that has any."""
        return np.flatnonzero(np.diff(self.pair, prepend=-1))


def _sending(pairs: Uplinks, row: Index, bits: Array) -> Uplinks:
    """Some uplinks that send so many bits more each."""
    uplinks = pairs.select(row)
    return replace(uplinks, k=uplinks.k + bits * uplinks.per_bit) if bits.any() else uplinks
