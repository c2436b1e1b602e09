"""Segments under the flow shop: D = sum t_k + (m - 1) max t_k, the last device without its link; exact.

For a bottleneck T the least sum over the sets of S devices, their last one and their TEBs comes from a dynamic
programme over the devices; A(T) does not rise with T. So (m - 1) T1 + A(T2) bounds every D whose bottleneck lies
between T1 and T2: branch and bound over the stage times that are possible. The m are tried in the order of
(m - 1) min T + A(inf).
"""

from __future__ import annotations

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

_PRECISION = 1e-13
_BATCH = 16
"""Bottlenecks that one dynamic programme decides."""


def flow_shop_choices(instance: Instance, limits: Limits) -> dict[int, SegmentChoice]:
    """Choices by S of one cluster; see :class:`strategies.dssda.segments.SegmentTable`."""
    sizes = instance.segment_range(limits.cluster)
    if not sizes:
        return {}
    stages = [_Stages(limits, row, sizes[-1], instance.L) for row in range(len(instance.m_set))]
    m = np.array(instance.m_set, dtype=np.float64)
    keep = slice(sizes[0] - 1, sizes[-1])
    sums = np.array([s.least_sums(np.array([np.inf]))[0] for s in stages])[:, keep]
    shortest = np.array([s.least_bottleneck() for s in stages])[:, None]
    # An m without any bottleneck has no sums either.
    bound = sums + (m[:, None] - 1) * np.where(np.isfinite(shortest), shortest, 0.0)
    best = np.full(len(sizes), np.inf)
    best_places: dict[int, tuple[int, float]] = {}
    cost = [instance.clusters[limits.cluster].size_cost(s) for s in sizes]
    rising = bool(np.all(np.diff(cost) >= 0))
    for row in np.argsort(bound.min(axis=1), kind="stable"):
        if bound[row].min() >= best.max():
            break
        seconds, bottleneck = stages[row].best(float(m[row]), keep, sums[row], best, rising)
        for i in np.flatnonzero(seconds < best):
            best[i], best_places[sizes[i]] = seconds[i], (int(row), float(bottleneck[i]))
    choices: dict[int, SegmentChoice] = {}
    for size in sorted(best_places):
        row, bottleneck = best_places[size]
        delta, last = stages[row].segments(bottleneck, size)
        num_micro_batches = instance.m_set[row]
        seconds = pipeline_seconds(instance, limits.cluster, delta, num_micro_batches, last)
        if not rising or seconds < min((c.pipeline_s for c in choices.values()), default=np.inf):
            choices[size] = SegmentChoice(tuple(delta), num_micro_batches, last, seconds)
    return choices


class _Stages:
    """The devices of a cluster for one m."""

    def __init__(self, limits: Limits, row: int, max_size: int, num_blocks: int) -> None:
        self._teb, self._link = limits.teb_s[row], limits.link_s[row]
        self._cap, self._last_cap = limits.cap[row], limits.last_cap[row]
        self._max_size, self._num_blocks = max_size, num_blocks
        blocks = np.arange(1, num_blocks + 1)[:, None]
        times = [(blocks * self._teb + link)[blocks <= cap] for link, cap in self._kinds()]
        self.times: Array = np.unique(np.concatenate(times))
        """Possible stage times, ascending."""

    def _kinds(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Link times and caps as a device in the middle and as the last one."""
        return (self._link, self._cap), (np.zeros_like(self._link), self._last_cap)

    def least_bottleneck(self) -> float:
        """A bound of max t_k: by caps alone the L TEBs would not fit below it; inf where they never do."""
        low, high = 0, len(self.times)
        while low < high:
            middle = (low + high) // 2
            counts = [self._counts(self.times[middle : middle + 1], *kind)[0] for kind in self._kinds()]
            enough = float(np.maximum(*counts).sum()) >= self._num_blocks
            low, high = (low, middle) if enough else (middle + 1, high)
        return float(self.times[low]) if low < len(self.times) else np.inf

    def _counts(self, bottleneck: Array, link: Array, cap: Array) -> Array:
        """TEBs that each device may hold, (T, K)."""
        # A T that is a stage time itself must admit that stage in spite of rounding.
        room = (bottleneck[:, None] * (1 + _PRECISION) - link) / self._teb
        return np.minimum(np.floor(room), cap).clip(0.0)

    def _programme(self, bottleneck: Array) -> list[Array]:
        """Least sums after each device, (T, last chosen or not, S + 1, L + 1) each."""
        middle, end = (self._counts(bottleneck, *kind) for kind in self._kinds())
        state = np.full((len(bottleneck), 2, self._max_size + 1, self._num_blocks + 1), np.inf)
        state[:, 0, 0, 0] = 0.0
        states = [state]
        for k, teb in enumerate(self._teb):
            next_state = state.copy()
            for blocks in range(1, int(max(middle[:, k].max(), end[:, k].max())) + 1):
                seconds, source = blocks * teb, state[:, :, :-1, : self._num_blocks + 1 - blocks]
                inner = np.where(middle[:, k] >= blocks, seconds + self._link[k], np.inf)[:, None, None, None]
                target = next_state[:, :, 1:, blocks:]
                np.minimum(target, source + inner, out=target)
                outer = np.where(end[:, k] >= blocks, seconds, np.inf)[:, None, None]
                np.minimum(target[:, 1], source[:, 0] + outer, out=target[:, 1])
            state = next_state
            states.append(state)
        return states

    def least_sums(self, bottleneck: Array) -> Array:
        """A(T) for S = 1 to the largest, (T, S)."""
        return np.asarray(self._programme(bottleneck)[-1][:, 1, 1:, -1])

    def best(self, m: float, keep: slice, floor: Array, incumbent: Array, rising: bool) -> tuple[Array, Array]:
        """Least D and its T for every S of ``keep``, where it beats what is known; (S,) each.

        Parameters
        ----------
        floor : (S,), A(inf)
        incumbent : (S,), best D so far
        rising : whether fewer segments that are as fast make more of them useless
        """
        best, bottleneck = incumbent.copy(), np.full(len(incumbent), np.nan)
        values: dict[int, Array] = {}

        def to_beat() -> Array:
            return np.minimum.accumulate(best) if rising else best

        def decide(places: list[int]) -> None:
            for start in range(0, len(places), _BATCH):
                part = places[start : start + _BATCH]
                sums = self.least_sums(self.times[part])[:, keep]
                for place, row in zip(part, sums, strict=True):
                    values[place] = row
                    total = row + (m - 1) * self.times[place]
                    better = total < best
                    best[better], bottleneck[better] = total[better], self.times[place]

        last = len(self.times) - 1
        if last < 0:
            return best, bottleneck
        decide(sorted({int(p) for p in np.linspace(0, last, _BATCH)}))
        while True:
            places = sorted(values)
            # Between two decided places T is at least the next time after the first, A at least that of the second.
            open_ = [
                (a + b) // 2
                for a, b in zip(places, places[1:], strict=False)
                if b - a > 1 and np.any(values[b] + (m - 1) * self.times[a + 1] < to_beat() * (1 - 1e-14))
            ]
            if not open_ or not np.any(floor < to_beat()):
                return best, bottleneck
            decide(open_)

    def segments(self, bottleneck: float, size: int) -> tuple[list[int], int]:
        """TEBs of each device and the last device, for the least sum at T with S segments."""
        states = self._programme(np.array([bottleneck]))
        middle, end = (self._counts(np.array([bottleneck]), *kind)[0] for kind in self._kinds())
        delta, last = [0] * len(self._teb), -1
        num_chosen, blocks = 1, self._num_blocks
        for k in range(len(self._teb) - 1, -1, -1):
            value, previous_state = states[k + 1][0, num_chosen, size, blocks], states[k][0]
            if previous_state[num_chosen, size, blocks] == value:
                continue
            options = [(count, False) for count in range(1, min(int(middle[k]), blocks) + 1)]
            options += [(count, True) for count in range(1, min(int(end[k]), blocks) + 1) if num_chosen]
            for count, ends in options:
                cost = count * self._teb[k] + (0.0 if ends else self._link[k])
                if previous_state[0 if ends else num_chosen, size - 1, blocks - count] + cost == value:
                    delta[k], size, blocks = count, size - 1, blocks - count
                    if ends:
                        last, num_chosen = k, 0
                    break
        return delta, last
