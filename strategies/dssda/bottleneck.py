"""Segments under Eq. (15): D = (S + m - 1) max t_k - max tau_k, exact, for many clusters at once.

For a bottleneck T device k may hold c_k(T) = min(cap_k, floor((T - tau_k) / a_k)) TEBs, and T works for S segments when
the S largest c_k are at least 1 and sum to at least L. That needs no search among the 2^K sets of devices. The least T
is found by bisection.

With ``tail = last`` a slow link in the pipeline is a merit: the least of (S + m - 1) T_q - tau_q over the devices q,
with T_q the least T that works with q among the S. Taking the largest tau_k for q's can only lower D, so this is exact.

Not all m are tried: with x(S) the least max delta_k / (phi_k f_k) at the largest caps of any m,

    D >= (S + m - 1) (work(m) x(S) + t0 + min tau_k) - max tau_k,

and (S, m) are tried in the order of this bound until it reaches the best D of the same or, as they cost no more, of
fewer segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

Index = NDArray[np.intp]
_PRECISION = 1e-13
"""Relative width at which a bisection ends."""


@dataclass(frozen=True)
class _Cases:
    """Cases to decide, (C, K) or (C,): the devices' times and caps for an m, and the number of segments."""

    teb_s: Array
    link_s: Array
    cap: Array
    size: Index
    num_blocks: int

    def at(self, rows: Index | NDArray[np.bool_]) -> _Cases:
        return _Cases(self.teb_s[rows], self.link_s[rows], self.cap[rows], self.size[rows], self.num_blocks)

    def counts(self, bottleneck: Array) -> Array:
        """c_k(T), (C, K)."""
        # A T that is a stage time itself must admit that stage in spite of rounding.
        room = (bottleneck[:, None] * (1 + _PRECISION) - self.link_s) / self.teb_s
        return np.minimum(np.floor(room), self.cap).clip(0.0)

    def works(self, bottleneck: Array, forced: Index | None = None) -> NDArray[np.bool_]:
        """Whether T works, (C,); with ``forced``, with that device among the S."""
        counts, smallest, total = self._largest(bottleneck)
        if forced is None:
            return np.asarray((smallest >= 1) & (total >= self.num_blocks))
        own = counts[np.arange(len(counts)), forced]
        return self._with(own, smallest, total)

    def members(self, bottleneck: Array) -> NDArray[np.bool_]:
        """Which devices may be among the S at T, (C, K)."""
        counts, smallest, total = self._largest(bottleneck)
        return self._with(counts, smallest[:, None], total[:, None])

    def _largest(self, bottleneck: Array) -> tuple[Array, Array, Array]:
        """c_k(T), and of the S largest the smallest and the sum."""
        counts = self.counts(bottleneck)
        ranked = -np.sort(-counts, axis=1)
        rows = np.arange(len(counts))
        return counts, ranked[rows, self.size - 1], np.cumsum(ranked, axis=1)[rows, self.size - 1]

    def _with(self, own: Array, smallest: Array, total: Array) -> NDArray[np.bool_]:
        """A device outside the S largest takes the place of the smallest of them."""
        short = np.maximum(smallest - own, 0.0)
        return np.asarray((smallest - short >= 1) & (total - short >= self.num_blocks))

    def least(self, low: Array, forced: Index | None = None) -> Array:
        """The least T that works, (C,); inf where none does.

        Parameters
        ----------
        low : no T below it works
        """
        full = np.max(self.cap * self.teb_s + self.link_s, axis=1)
        high = np.where(self.works(full, forced), full, np.inf)
        rows = np.flatnonzero(np.isfinite(high))
        if len(rows) == 0:
            return high
        cases, device = self.at(rows), None if forced is None else forced[rows]
        spread = np.ptp(cases.link_s, axis=1) + 1e-6 * low[rows]
        below, above = np.minimum(low[rows], high[rows]), high[rows]
        # The bound is close: look just above it first.
        near = np.minimum(below + spread, above)
        holds = cases.works(near, device)
        below, above = np.where(holds, below, near), np.where(holds, near, above)
        for _ in range(100):
            middle = (below + above) / 2
            if np.all(above - below <= _PRECISION * above):
                break
            holds = cases.works(middle, device)
            below, above = np.where(holds, below, middle), np.where(holds, middle, above)
        high[rows] = above
        return high


def eq15_choices(instance: Instance, limits: Sequence[Limits]) -> list[dict[int, SegmentChoice]]:
    """Choices by S of several clusters; see :class:`strategies.dssda.segments.SegmentTable`."""
    choices_by_cluster: list[dict[int, SegmentChoice]] = [{} for _ in limits]
    by_devices: dict[int, list[int]] = {}
    for i, limit in enumerate(limits):
        by_devices.setdefault(len(limit.memory_cap), []).append(i)
    for places in by_devices.values():
        for i, choices in zip(places, _Search(instance, [limits[i] for i in places]).run(), strict=True):
            choices_by_cluster[i] = choices
    return choices_by_cluster


class _Search:
    """Best-first search over m, for all clusters of one K and all S at once."""

    def __init__(self, instance: Instance, limits: Sequence[Limits]) -> None:
        self._instance, self._limits = instance, limits
        sizes = instance.segment_range(limits[0].cluster)
        self._m = np.array(instance.m_set, dtype=np.intp)
        self._teb = np.array([x.teb_s for x in limits])
        self._link = np.array([x.link_s for x in limits])
        self._cap = np.array([x.cap for x in limits])
        self._limits_index = np.repeat(np.arange(len(limits)), len(sizes))
        self._size = np.tile(np.array(sizes, dtype=np.intp), len(limits))
        self._num_sizes = len(sizes)
        # More segments that cost less stay in the table, even if they are slower.
        costs = [[instance.clusters[x.cluster].size_cost(s) for s in sizes] for x in limits]
        self._rising = np.array([bool(np.all(np.diff(c) >= 0)) for c in costs])

    def run(self) -> list[dict[int, SegmentChoice]]:
        """Return the choices by S of each cluster."""
        rows = np.arange(len(self._limits_index))
        if len(rows) == 0:
            return [{} for _ in self._limits]
        bound = self._bounds()
        order = np.argsort(bound, axis=1, kind="stable")
        best = np.full(len(rows), np.inf)
        best_m, best_t = np.zeros(len(rows), dtype=np.intp), np.full(len(rows), np.inf)
        best_q = np.full(len(rows), -1, dtype=np.intp)
        for step in range(len(self._m)):
            column = order[:, step]
            active = np.flatnonzero(bound[rows, column] < self._to_beat(best))
            if len(active) == 0:
                break
            m = column[active]
            seconds, bottleneck, forced = self._solve(active, m, bound[active, m])
            better = seconds < best[active]
            chosen = active[better]
            best[chosen], best_m[chosen] = seconds[better], m[better]
            best_t[chosen], best_q[chosen] = bottleneck[better], forced[better]
        useful = np.isfinite(best) & (best <= self._to_beat(best))
        choices: list[dict[int, SegmentChoice]] = [{} for _ in self._limits]
        for row in np.flatnonzero(useful):
            i = self._limits_index[row]
            choice = self._choice(int(row), int(best_m[row]), float(best_t[row]), int(best_q[row]))
            smaller = min((c.pipeline_s for c in choices[i].values()), default=np.inf)
            if choice.pipeline_s < smaller or not self._rising[i]:
                choices[i][int(self._size[row])] = choice
        return choices

    def _to_beat(self, best: Array) -> Array:
        """Least D of the same S; where more segments cost no less, of fewer ones too."""
        table = best.reshape(len(self._limits), self._num_sizes)
        return np.where(self._rising[:, None], np.minimum.accumulate(table, axis=1), table).ravel()

    def _bounds(self) -> Array:
        """Lower bound of D, (rows, M)."""
        instance = self._instance
        speed = np.array([d.phi * d.f for d in (instance.device_arrays(x.cluster) for x in self._limits)])
        cases = _Cases(
            teb_s=1.0 / speed[self._limits_index],
            link_s=np.zeros((len(self._limits_index), speed.shape[1])),
            cap=self._cap.max(axis=1)[self._limits_index],
            size=self._size,
            num_blocks=instance.L,
        )
        relaxed = cases.least(np.zeros(len(self._limits_index)))[:, None] * (1 - 1e-9)
        work = np.asarray(instance.work(self._m.astype(np.float64)))
        least = work * relaxed + instance.t0 + self._link.min(axis=2)[self._limits_index]
        saved = self._link.max(axis=2)[self._limits_index] if instance.tail == "last" else 0.0
        return np.asarray((self._size[:, None] + self._m - 1) * least - saved)

    def _cases(self, rows: Index, m: Index) -> _Cases:
        i = self._limits_index[rows]
        return _Cases(self._teb[i, m], self._link[i, m], self._cap[i, m], self._size[rows], self._instance.L)

    def _solve(self, rows: Index, m: Index, bound: Array) -> tuple[Array, Array, Index]:
        """D, T and the device that makes the tail (-1: any), (C,) each."""
        cases = self._cases(rows, m)
        rounds = self._size[rows] + self._m[m] - 1.0
        saved = cases.link_s.max(axis=1) if self._instance.tail == "last" else 0.0
        free = cases.least((bound + saved) / rounds)
        none = np.full(len(rows), -1, dtype=np.intp)
        if self._instance.tail == "none":
            return rounds * free, free, none
        seconds, bottleneck, forced = np.full(len(rows), np.inf), free, none
        feasible_rows = np.flatnonzero(np.isfinite(free))
        if len(feasible_rows) == 0:
            return seconds, bottleneck, forced
        # Some device has the largest tau at the least T of all.
        feasible_cases = cases.at(feasible_rows)
        tails = np.where(feasible_cases.members(free[feasible_rows]), feasible_cases.link_s, -np.inf)
        forced[feasible_rows], tail = np.argmax(tails, axis=1), np.max(tails, axis=1)
        seconds[feasible_rows] = rounds[feasible_rows] * free[feasible_rows] - tail
        # A device with a larger tau needs a larger T; few come in time to be worth it.
        row, q = np.nonzero(feasible_cases.link_s > tail[:, None])
        row, own_link_s = feasible_rows[row], cases.link_s[feasible_rows[row], q]
        worth = (seconds[row] + own_link_s) / rounds[row]
        is_within = cases.at(row).works(worth, q)
        row, q, own_link_s = row[is_within], q[is_within], own_link_s[is_within]
        least = cases.at(row).least(free[row], q)
        value = rounds[row] * least - own_link_s
        for place in np.argsort(-value):  # the best of a row is written last
            if value[place] < seconds[row[place]]:
                seconds[row[place]], bottleneck[row[place]], forced[row[place]] = value[place], least[place], q[place]
        return seconds, bottleneck, forced

    def _choice(self, row: int, m: int, bottleneck: float, forced: int) -> SegmentChoice:
        """Segments that meet the bottleneck: the S roomiest devices, the faster ones filled first."""
        case = self._cases(np.array([row]), np.array([m]))
        counts, size = case.counts(np.array([bottleneck]))[0], int(self._size[row])
        devices = [int(k) for k in np.argsort(-counts, kind="stable") if k != forced]
        devices = devices[:size] if forced < 0 else [int(forced), *devices[: size - 1]]
        delta = [0] * len(counts)
        blocks_left = self._instance.L - size
        for k in sorted(devices, key=lambda k: case.teb_s[0, k]):
            extra = min(blocks_left, int(counts[k]) - 1)
            delta[k], blocks_left = 1 + extra, blocks_left - extra
        cluster, num_micro_batches = self._limits[self._limits_index[row]].cluster, int(self._m[m])
        seconds = pipeline_seconds(self._instance, cluster, delta, num_micro_batches, None)
        return SegmentChoice(tuple(delta), num_micro_batches, None, seconds)
