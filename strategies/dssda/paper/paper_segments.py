"""Algorithm 2 of the paper: segments and number of micro-batches of one cluster under Eq. (15), arXiv:2509.19855v1.

For every set of devices, the O(2^K) of the paper, two steps alternate until D falls no more:

1. given m, the segments: the least bottleneck max t_k;
2. given the segments, the number of micro-batches: m* in closed form, Eqs. (33) to (39), then the better of its
   neighbours in ``m_set``.

Each step is optimal, both in turn need not be: :mod:`strategies.dssda.segments` finds the optimum, without the 2^K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array, Real
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds, teb_and_link_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits
from strategies.dssda.segments import segment_table

Index = NDArray[np.intp]
MOST_DEVICES = 12
"""K up to which all sets of devices are tried."""


def micro_batches(num_segments: Real, shared_s: Real, fixed_s: Real) -> Array:
    """Real number of micro-batches of least D for given segments, Eqs. (33) to (39).

        D(m) = (S + m - 1) (shared / m + fixed) - tau,    m* = sqrt((S - 1) shared / fixed)

    The slowest stage spends shared = b delta o_l / (phi f) on a batch, whatever m, and on every micro-batch
    fixed = delta o'_l / (phi f) + tau more. Printed is ``S o_l + m o'_l``, a typo for ``b o_l + m o'_l`` of Eq. (15):
    with S in the place of b, m* cannot exceed 4.5 for S up to 5, where the paper reports 9 to 14.

    Parameters
    ----------
    num_segments : S
    shared_s : time of the slowest stage that its micro-batches share [s]
    fixed_s : time of the slowest stage that each micro-batch takes anew [s]

    Returns
    -------
    m*; inf where a micro-batch takes nothing anew.
    """
    gain, loss = np.broadcast_arrays((np.asarray(num_segments) - 1.0) * shared_s, np.asarray(fixed_s, dtype=np.float64))
    return np.sqrt(np.divide(gain, loss, out=np.where(gain > 0, np.inf, 0.0), where=loss > 0))


def paper_segment_choices(instance: Instance, cluster: int) -> Mapping[int, SegmentChoice]:
    """Segments and micro-batches that Algorithm 2 arrives at, by S; empty where C1, C2, C7 and C9 leave none.

    The paper has Eq. (15) and few devices. Under the flow shop, and with more than ``MOST_DEVICES`` devices, these are
    the exact choices.
    """
    if instance.latency != "eq15" or len(instance.clusters[cluster].devices) > MOST_DEVICES:
        return segment_table(instance, cluster).choices
    delta, m, seconds = _Alternation(instance, cluster).run()
    best: dict[int, SegmentChoice] = {}
    for row in np.argsort(seconds, kind="stable")[: np.isfinite(seconds).sum()]:
        blocks = tuple(int(d) for d in delta[row])
        size = sum(d > 0 for d in blocks)
        if size not in best:
            best[size] = SegmentChoice(
                blocks, int(m[row]), None, pipeline_seconds(instance, cluster, blocks, int(m[row]), None)
            )
    return best


def best_micro_batches(instance: Instance, cluster: int, choice: SegmentChoice) -> SegmentChoice:
    """Step 2 by itself: the segments of a choice with the m of (38), or its own where that is no worse."""
    if instance.latency != "eq15" or len(choice.delta) > MOST_DEVICES:
        return choice
    alternation = _Alternation(instance, cluster)
    at = alternation.best_m(np.array([choice.delta], dtype=np.intp), instance.m_set.index(choice.m))
    m = instance.m_set[at]
    return replace(choice, m=m, pipeline_s=pipeline_seconds(instance, cluster, choice.delta, m, choice.last))


def cheapest_sizes(instance: Instance, tables: Mapping[int, Mapping[int, SegmentChoice]]) -> dict[int, int]:
    """The S of each cluster for the least V max_n D_n + size costs: exact, for the max is one of the D.

    Parameters
    ----------
    tables : by cluster, its choices by S
    """
    seconds, costs, sizes = {}, {}, {}
    for n, table in tables.items():
        front = sorted(table.values(), key=lambda choice: choice.pipeline_s)
        size_cost = [instance.clusters[n].size_cost(choice.num_segments) for choice in front]
        seconds[n] = instance.steps * np.array([choice.pipeline_s for choice in front])
        costs[n] = np.minimum.accumulate(size_cost)
        sizes[n] = [front[size_cost.index(least)].num_segments for least in costs[n]]
    latest = np.concatenate(list(seconds.values()))
    latest = latest[latest >= max(s[0] for s in seconds.values())]
    at = {n: np.searchsorted(s, latest, side="right") - 1 for n, s in seconds.items()}
    best = np.argmin(instance.V * latest + np.sum([costs[n][at[n]] for n in tables], axis=0))
    return {n: sizes[n][at[n][best]] for n in tables}


class _Slope(NamedTuple):
    """A time of each device that falls with m as shared / m + fixed, (K,) each [s]."""

    shared: Array
    fixed: Array


class _Alternation:
    """Both steps for all sets of devices at once: rows are sets (P), columns devices (K)."""

    def __init__(self, instance: Instance, cluster: int) -> None:
        num_devices = len(instance.clusters[cluster].devices)
        sets = (np.arange(1, 1 << num_devices)[:, None] >> np.arange(num_devices) & 1).astype(bool)
        self._device_sets = sets[np.isin(sets.sum(axis=1), instance.segment_range(cluster))]
        self._size = self._device_sets.sum(axis=1)
        self._num_blocks, self._tail = instance.L, instance.tail
        self._m = np.array(instance.m_set, dtype=np.float64)
        self._limits = Limits.of(instance, cluster)
        # A micro-batch that holds the whole batch, and one that holds no samples.
        whole, empty = (teb_and_link_seconds(instance, cluster, m) for m in (1.0, np.inf))
        self._teb, self._link = (_Slope(of_whole - fixed, fixed) for of_whole, fixed in zip(whole, empty, strict=True))

    def run(self) -> tuple[Index, Index, Array]:
        """Segments (P, K), numbers of micro-batches (P,) and D (P,) [s], which is inf where a set has no segments."""
        # Begin with m* of equal segments without links, or the nearest m for which there are segments at all.
        held = np.where(self._device_sets, self._limits.cap[:, None, :], 0.0)  # (M, P, K)
        possible = (held.sum(axis=2) >= self._num_blocks) & np.all((held >= 1) | ~self._device_sets, axis=2)
        optimal_m = micro_batches(self._size, self._device_sets @ self._teb.shared, self._device_sets @ self._teb.fixed)
        away = np.abs(np.log(self._m[:, None] / np.clip(optimal_m, self._m[0], self._m[-1])))
        at = np.argmin(np.where(possible, away, np.inf), axis=0)
        delta, seconds = np.zeros(self._device_sets.shape, dtype=np.intp), np.full(len(at), np.inf)
        rows = np.flatnonzero(possible.any(axis=0))
        while len(rows):
            blocks = self._segments(rows, at[rows])
            m = self._micro_batches(blocks, at[rows])
            candidate_s = self._seconds(blocks, m)
            better = candidate_s < seconds[rows] * (1 - 1e-12)
            rows = rows[better]
            delta[rows], at[rows], seconds[rows] = blocks[better], m[better], candidate_s[better]
        return delta, self._m[at].astype(np.intp), seconds

    def best_m(self, blocks: Index, at: int) -> int:
        """Place in ``m_set`` of the best m for one row of segments that has had the one at ``at``."""
        return int(self._micro_batches(blocks, np.array([at]))[0])

    def _segments(self, rows: Index, at: Index) -> Index:
        """Step 1: a TEB each, then the next one wherever it ends first; that is the least bottleneck of the set."""
        teb, link = self._limits.teb_s[at], self._limits.link_s[at]
        room = np.where(self._device_sets[rows], self._limits.cap[at], 0.0)
        blocks = self._device_sets[rows].astype(np.intp)
        for _ in range(self._num_blocks - 1):
            active = np.flatnonzero(blocks.sum(axis=1) < self._num_blocks)
            more = blocks[active] + 1
            ends = np.where(more <= room[active], more * teb[active] + link[active], np.inf)
            blocks[active, np.argmin(ends, axis=1)] += 1
        return blocks

    def _micro_batches(self, blocks: Index, at: Index) -> Index:
        """Step 2: places in ``m_set``, of those that C9 allows the segments."""
        rows, slowest = np.arange(len(blocks)), np.argmax(self._stages(blocks, at), axis=1)
        slowest_blocks = blocks[rows, slowest]
        optimal_m = micro_batches(
            (blocks > 0).sum(axis=1),
            slowest_blocks * self._teb.shared[slowest] + self._link.shared[slowest],
            slowest_blocks * self._teb.fixed[slowest] + self._link.fixed[slowest],
        )
        # The energies of C9 fall with m (C9'), or rise with it: the m allowed lie side by side.
        allowed = np.all(blocks[:, None, :] <= self._limits.cap, axis=2)
        first, last = np.argmax(allowed, axis=1), len(self._m) - 1 - np.argmax(allowed[:, ::-1], axis=1)
        below = np.clip(np.searchsorted(self._m, optimal_m, side="right") - 1, first, last)
        above = np.minimum(below + 1, last)
        # Where another stage is the slowest at m*, the m so far may be better than both.
        candidates = np.stack([at, below, above])
        best = np.argmin([self._seconds(blocks, m) for m in candidates], axis=0)
        return np.asarray(candidates[best, rows])

    def _stages(self, blocks: Index, at: Index) -> Array:
        """Stage times t_k, 0 for idle devices, (P, K) [s]."""
        return np.where(blocks > 0, blocks * self._limits.teb_s[at] + self._limits.link_s[at], 0.0)

    def _seconds(self, blocks: Index, at: Index) -> Array:
        """D, Eq. (15), (P,) [s]."""
        slowest = np.max(self._stages(blocks, at), axis=1)
        link = np.max(np.where(blocks > 0, self._limits.link_s[at], 0.0), axis=1) if self._tail == "last" else 0.0
        return np.asarray(((blocks > 0).sum(axis=1) + self._m[at] - 1) * slowest - link)
