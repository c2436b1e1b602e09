"""Segments under the flow shop: D = sum t_k + (m - 1) max t_k, the last device without its link; exact.

For a bottleneck T the least sum A(T) over the sets of S devices, their last one and their TEBs comes from a dynamic
programme over the devices (:func:`least_sums`). A(T) does not rise with T. So (m - 1) T1 + A(T2)
bounds every D whose bottleneck lies between T1 and T2: branch and bound over the stage times of all m at once. A(T2)
itself is bounded by a price per TEB (:mod:`strategies.dssda.block_price`), which is so close that the programme is left
with the few bottlenecks that may be the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.block_price import StageSums
from strategies.dssda.bottleneck import Index
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

_FIRST_CUTS = 8
"""Intervals into which the stage times of each m are cut first."""
_BATCH = 16
"""Most bottlenecks that one dynamic programme decides."""
_SLACK = 1 - 1e-12
"""A bound this close to the best D is beaten by rounding alone."""


def flow_shop_choices(instance: Instance, limits: Limits) -> dict[int, SegmentChoice]:
    """Choices by S of one cluster; see :class:`strategies.dssda.segments.SegmentTable`."""
    sizes = instance.segment_range(limits.cluster)
    if not sizes:
        return {}
    cost = [instance.clusters[limits.cluster].size_cost(s) for s in sizes]
    rising = bool(np.all(np.diff(cost) >= 0))
    search = _Search(instance, limits, rising)
    search.run()
    choices: dict[int, SegmentChoice] = {}
    for size, (row, bottleneck) in sorted(search.best_places.items()):
        sums = StageSums.of(limits, np.array([row]), np.array([bottleneck]), instance.L)
        delta, last = least_segments(sums, size)
        num_micro_batches = instance.m_set[row]
        seconds = pipeline_seconds(instance, limits.cluster, delta, num_micro_batches, last)
        if not rising or seconds < min((c.pipeline_s for c in choices.values()), default=np.inf):
            choices[size] = SegmentChoice(tuple(delta), num_micro_batches, last, seconds)
    return choices


@dataclass(frozen=True)
class _Intervals:
    """Bottlenecks of an m between two of its stage times, the later one included, (I,) or (I, S)."""

    row: Index
    """Place of m in ``m_set``."""
    after: Index
    upto: Index
    """Places among the stage times of m."""
    least_sum: Array
    """Below A of the later one, for each S, (I, S)."""
    decided: NDArray[np.bool_]
    """True where ``least_sum`` is A itself."""

    def at(self, rows: Index | NDArray[np.bool_]) -> _Intervals:
        return _Intervals(self.row[rows], self.after[rows], self.upto[rows], self.least_sum[rows], self.decided[rows])

    def and_these(self, other: _Intervals) -> _Intervals:
        pairs = [
            (self.row, other.row),
            (self.after, other.after),
            (self.upto, other.upto),
            (self.least_sum, other.least_sum),
            (self.decided, other.decided),
        ]
        return _Intervals(*(np.concatenate(pair) for pair in pairs))


class _Search:
    """Branch and bound over (m, T), for all S at once."""

    def __init__(self, instance: Instance, limits: Limits, rising: bool) -> None:
        sizes = instance.segment_range(limits.cluster)
        self._limits, self._num_blocks, self._rising = limits, instance.L, rising
        self._sizes = sizes
        self._rounds = np.array(instance.m_set, dtype=np.float64) - 1
        times = [self._stage_times(row) for row in range(len(instance.m_set))]
        self._count = np.array([len(t) for t in times], dtype=np.intp)
        self._times = np.full((len(times), max(1, int(self._count.max()))), np.inf)
        for row, values in enumerate(times):
            self._times[row, : len(values)] = values
        self._best = np.full(len(sizes), np.inf)
        self.best_places: dict[int, tuple[int, float]] = {}
        """By S: the place of m in ``m_set`` and T of the least D."""

    def run(self) -> None:
        """Find the least D of every S, but for an S that takes as long as a smaller one and costs no less."""
        intervals = self._first_intervals()
        while True:
            intervals = intervals.at(self._open(intervals))
            if len(intervals.row) == 0:
                return
            intervals = self._decide(intervals)
            wide = intervals.upto - intervals.after > 1
            intervals = intervals.at(~wide).and_these(self._halves(intervals.at(wide)))

    def _stage_times(self, row: int) -> Array:
        """Possible stage times of an m, ascending."""
        limits, blocks = self._limits, np.arange(1, self._num_blocks + 1)[:, None]
        kinds = (limits.link_s[row], limits.cap[row]), (0.0, limits.last_cap[row])
        return np.unique(np.concatenate([(blocks * limits.teb_s[row] + link)[blocks <= cap] for link, cap in kinds]))

    def _to_beat(self) -> Array:
        """Least D of the same S; where more segments cost no less, of fewer ones too."""
        return np.minimum.accumulate(self._best) if self._rising else self._best

    def _first_intervals(self) -> _Intervals:
        cuts = np.arange(_FIRST_CUTS + 1) * (self._count[:, None] - 1) // _FIRST_CUTS
        cuts[:, 0] = -1
        row, column = np.nonzero(np.diff(cuts, axis=1) > 0)
        return self._bounded(row, cuts[row, column], cuts[row, column + 1])

    def _bounded(self, row: Index, after: Index, upto: Index) -> _Intervals:
        least_sum = self._sums(row, upto).bounds(self._sizes[-1])[:, self._sizes[0] - 1 :]
        return _Intervals(row, after, upto, least_sum, np.zeros(len(row), dtype=bool))

    def _sums(self, row: Index, place: Index) -> StageSums:
        return StageSums.of(self._limits, row, self._times[row, place], self._num_blocks)

    def _open(self, intervals: _Intervals) -> NDArray[np.bool_]:
        """Find the intervals with a bottleneck that may still lead to a D below the best."""
        least_time = self._times[intervals.row, intervals.after + 1]
        bound = intervals.least_sum + (self._rounds[intervals.row] * least_time)[:, None]
        alone = intervals.upto - intervals.after == 1
        return np.any(bound < self._to_beat() * _SLACK, axis=1) & ~(alone & intervals.decided)

    def _halves(self, intervals: _Intervals) -> _Intervals:
        middle = (intervals.after + intervals.upto) // 2
        later = _Intervals(intervals.row, middle, intervals.upto, intervals.least_sum, intervals.decided)
        return self._bounded(intervals.row, intervals.after, middle).and_these(later)

    def _decide(self, intervals: _Intervals) -> _Intervals:
        """Find A at the later ends that promise the least D of some S."""
        promise = (
            intervals.least_sum + (self._rounds[intervals.row] * self._times[intervals.row, intervals.upto])[:, None]
        )
        promise[intervals.decided] = np.inf
        chosen = np.unique(np.argmin(promise, axis=0)[promise.min(axis=0) < self._to_beat() * _SLACK])
        chosen = chosen[:_BATCH]
        if len(chosen) == 0:
            return intervals
        row, place = intervals.row[chosen], intervals.upto[chosen]
        sums = least_sums(self._sums(row, place), self._sizes[-1])[:, self._sizes[0] - 1 :]
        least_sum, decided = intervals.least_sum.copy(), intervals.decided.copy()
        least_sum[chosen], decided[chosen] = sums, True
        bottleneck = self._times[row, place]
        seconds = sums + (self._rounds[row] * bottleneck)[:, None]
        for i in np.flatnonzero(seconds.min(axis=0) < self._best):
            best = int(np.argmin(seconds[:, i]))
            self._best[i] = seconds[best, i]
            self.best_places[self._sizes[i]] = int(row[best]), float(bottleneck[best])
        return _Intervals(intervals.row, intervals.after, intervals.upto, least_sum, decided)


def least_sums(sums: StageSums, max_size: int) -> Array:
    """A(T) for S = 1 to ``max_size``, (P, S); inf where no S devices hold the L TEBs."""
    return np.asarray(_states(sums, max_size)[-1][:, 1, 1:, -1])


def least_segments(sums: StageSums, size: int) -> tuple[list[int], int]:
    """TEBs of each device and the last device, for the least sum of S segments at a single pair of m and T."""
    states = _states(sums, size)
    teb, link, middle, end = sums.teb_s[0], sums.link_s[0], sums.middle[0], sums.end[0]
    delta, last = [0] * len(teb), -1
    num_chosen, blocks = 1, sums.num_blocks
    for k in range(len(teb) - 1, -1, -1):
        value, previous_state = states[k + 1][0, num_chosen, size, blocks], states[k][0]
        if previous_state[num_chosen, size, blocks] == value:
            continue
        options = [(count, False) for count in range(1, min(int(middle[k]), blocks) + 1)]
        options += [(count, True) for count in range(1, min(int(end[k]), blocks) + 1) if num_chosen]
        for count, ends in options:
            cost = count * teb[k] + (0.0 if ends else link[k])
            if previous_state[0 if ends else num_chosen, size - 1, blocks - count] + cost == value:
                delta[k], size, blocks = count, size - 1, blocks - count
                if ends:
                    last, num_chosen = k, 0
                break
    return delta, last


def _states(sums: StageSums, max_size: int) -> list[Array]:
    """Least sums after each device, (P, last chosen or not, S + 1, L + 1) each."""
    middle, end, num_blocks = sums.middle, sums.end, sums.num_blocks
    state = np.full((len(middle), 2, max_size + 1, num_blocks + 1), np.inf)
    state[:, 0, 0, 0] = 0.0
    states = [state]
    for k in range(middle.shape[1]):
        next_state = state.copy()
        chosen = min(k + 1, max_size)  # of the devices so far
        for blocks in range(1, int(max(middle[:, k].max(), end[:, k].max())) + 1):
            seconds = blocks * sums.teb_s[:, k]
            source = state[:, :, :chosen, : num_blocks + 1 - blocks]
            target = next_state[:, :, 1 : chosen + 1, blocks:]
            inner = np.where(middle[:, k] >= blocks, seconds + sums.link_s[:, k], np.inf)
            np.minimum(target, source + inner[:, None, None, None], out=target)
            outer = np.where(end[:, k] >= blocks, seconds, np.inf)
            np.minimum(target[:, 1], source[:, 0] + outer[:, None, None], out=target[:, 1])
        state = next_state
        states.append(state)
    return states
