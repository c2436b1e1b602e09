"""Segments under Eq. (15): D = (S + m - 1) max t_k - max tau_k, exact, for many clusters at once.

For each m and S the least max t_k is that of :mod:`strategies.dssda.bottleneck`. With ``tail = last`` a slow link in
the pipeline is a merit: the least of (S + m - 1) T_q - tau_q over the devices q, with T_q the least T that works with q
among the S. Taking the largest tau_k for q's can only lower D, so this is exact.

Not all m are tried: with x(S) the least max delta_k / (phi_k f_k) at the largest caps of any m,

    D >= (S + m - 1) (work(m) x(S) + t0 + min tau_k) - max tau_k,

and (S, m) are tried in the order of this bound until it reaches the best D of the same or, as they cost no more, of
fewer segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from client_pipeline.system.latency import pipeline_latency_paper, stage_time
from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.bottleneck import Index, StageCases
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

_BATCH = 2**13
"""Pairs of S and m that are decided together: they fill the processor's cache, not the memory."""


def closed_form_choices(instance: Instance, limits: Sequence[Limits]) -> list[dict[int, SegmentChoice]]:
    """Choices by S of several clusters; see :class:`strategies.dssda.segments.SegmentTable`."""
    choices_by_cluster: list[dict[int, SegmentChoice]] = [{} for _ in limits]
    by_devices: dict[int, list[int]] = {}
    for i, limit in enumerate(limits):
        by_devices.setdefault(len(limit.memory_cap), []).append(i)
    for places in by_devices.values():
        for i, choices in zip(places, _Search(instance, [limits[i] for i in places]).run(), strict=True):
            choices_by_cluster[i] = choices
    return choices_by_cluster


def choices_with_last(instance: Instance, limits: Sequence[Limits]) -> list[dict[int, SegmentChoice]]:
    """Choices by S of several clusters when the last device's budget (C9) pays no link: ``tail_energy = "none"``.

    D is the same whichever device is the last one, and only that device may hold more TEBs within its budget. So the
    least D is the least over the devices q that gain by it, with the caps that hold if q is the last one; and over
    nobody, where the caps are those of devices that all send. Every choice within one of these caps is possible: if q
    is not busy, any other device may be the last one.
    """
    variants: list[Limits] = []
    places: list[tuple[int, int | None]] = []
    for i, limit in enumerate(limits):
        gains = [int(k) for k in np.flatnonzero(np.any(limit.last_cap > limit.cap, axis=0))]
        for q in [None, *gains]:
            variants.append(limit if q is None else replace(limit, cap=_with_last(limit, q)))
            places.append((i, q))
    best: list[dict[int, SegmentChoice]] = [{} for _ in limits]
    for (i, q), choices in zip(places, closed_form_choices(instance, variants), strict=True):
        for size, choice in choices.items():
            known = best[i].get(size)
            if known is None or choice.pipeline_s < known.pipeline_s:
                best[i][size] = replace(choice, last=_last(instance, limits[i].cluster, choice, q))
    return best


def _with_last(limit: Limits, q: int) -> Array:
    return np.where(np.arange(limit.cap.shape[1]) == q, limit.last_cap, limit.cap)


def _last(instance: Instance, cluster: int, choice: SegmentChoice, q: int | None) -> int:
    if q is not None and choice.delta[q] > 0:
        return q
    devices = instance.device_arrays(cluster)
    return choice.order(devices.phi * devices.f)[-1]


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
        rows = len(self._limits_index)
        self._best = np.full(rows, np.inf)
        self._best_m = np.zeros(rows, dtype=np.intp)
        self._best_t = np.full(rows, np.inf)
        self._best_q = np.full(rows, -1, dtype=np.intp)

    def run(self) -> list[dict[int, SegmentChoice]]:
        """Return the choices by S of each cluster."""
        rows = np.arange(len(self._limits_index))
        if len(rows) == 0:
            return [{} for _ in self._limits]
        bound = self._bounds()
        column = np.argmin(bound, axis=1)
        least = bound[rows, column]
        # What is best of a whole cluster makes most of its larger S useless before they are tried.
        promise = least.reshape(len(self._limits), self._num_sizes)
        leading = np.argmin(promise, axis=1) + np.arange(len(self._limits)) * self._num_sizes
        self._try(leading, column[leading])
        # Bounds only rise from one m of a row to the next, and what is to beat only falls.
        active = rows
        while len(active := active[least[active] < self._to_beat()[active]]):
            self._try(active, column[active])
            bound[active, column[active]] = np.inf
            column[active] = np.argmin(bound[active], axis=1)
            least[active] = bound[active, column[active]]
        useful = np.isfinite(self._best) & (self._best <= self._to_beat())
        choices: list[dict[int, SegmentChoice]] = [{} for _ in self._limits]
        for row in np.flatnonzero(useful):
            i = self._limits_index[row]
            choice = self._choice(int(row), int(self._best_m[row]), float(self._best_t[row]), int(self._best_q[row]))
            smaller = min((c.pipeline_s for c in choices[i].values()), default=np.inf)
            if choice.pipeline_s < smaller or not self._rising[i]:
                choices[i][int(self._size[row])] = choice
        return choices

    def _to_beat(self) -> Array:
        """Least D of the same S; where more segments cost no less, of fewer ones too."""
        table = self._best.reshape(len(self._limits), self._num_sizes)
        return np.where(self._rising[:, None], np.minimum.accumulate(table, axis=1), table).ravel()

    def _bounds(self) -> Array:
        """Lower bound of D, (rows, M)."""
        instance = self._instance
        speed = np.array([d.phi * d.f for d in (instance.device_arrays(x.cluster) for x in self._limits)])
        relaxed = StageCases(1.0 / speed, np.zeros_like(speed), self._cap.max(axis=1), instance.L)
        least_x = relaxed.least(self._limits_index, self._size)[:, None] * (1 - 1e-9)
        work = np.asarray(instance.work(self._m.astype(np.float64)))
        least = work * least_x + instance.t0 + self._link.min(axis=2)[self._limits_index]
        saved = self._link.max(axis=2)[self._limits_index] if instance.tail == "last" else 0.0
        return np.asarray((self._size[:, None] + self._m - 1) * least - saved)

    def _cases(self, i: Index, m: Index) -> StageCases:
        return StageCases(self._teb[i, m], self._link[i, m], self._cap[i, m], self._instance.L)

    def _try(self, rows: Index, m: Index) -> None:
        """Find D of pairs of a row (a cluster and an S) and an m, and keep what is better."""
        # Rows of one cluster and m share their ranking.
        pair = self._limits_index[rows] * len(self._m) + m
        by_pair = np.argsort(pair, kind="stable")
        for start in range(0, len(rows), _BATCH):
            part = by_pair[start : start + _BATCH]
            self._solve(rows[part], m[part])

    def _solve(self, rows: Index, m: Index) -> None:
        pairs, case_row = np.unique(self._limits_index[rows] * len(self._m) + m, return_inverse=True)
        cases = self._cases(*np.divmod(pairs, len(self._m)))
        rounds = np.asarray(self._size[rows] + self._m[m] - 1, dtype=np.float64)
        least = cases.least(case_row, self._size[rows])
        largest_tail = cases.link_s.max(axis=1)[case_row] if self._instance.tail == "last" else 0.0
        hopeful = rounds * least - largest_tail < self._to_beat()[rows]
        rows, m, case_row = rows[hopeful], m[hopeful], case_row[hopeful]
        rounds, least = rounds[hopeful], least[hopeful]
        seconds, forced = rounds * least, np.full(len(rows), -1, dtype=np.intp)
        if self._instance.tail == "last" and len(rows):
            seconds, least, forced = _with_tail(cases.at(case_row), self._size[rows], rounds, least)
        better = seconds < self._best[rows]
        rows = rows[better]
        self._best[rows], self._best_m[rows] = seconds[better], m[better]
        self._best_t[rows], self._best_q[rows] = least[better], forced[better]

    def _choice(self, row: int, m: int, bottleneck: float, forced: int) -> SegmentChoice:
        """Segments that meet the bottleneck: the S roomiest devices, the faster ones filled first."""
        case = self._cases(self._limits_index[[row]], np.array([m]))
        counts, size = case.counts(np.array([bottleneck]))[0], int(self._size[row])
        teb_s, link_s = case.teb_s[0], case.link_s[0]
        devices = np.argsort(-counts, kind="stable")
        if forced >= 0:
            devices = np.concatenate([[forced], devices[devices != forced]])
        devices = devices[:size]
        delta = [0] * len(counts)
        blocks_left = self._instance.L - size
        for k in devices[np.argsort(teb_s[devices], kind="stable")].tolist():
            extra = min(blocks_left, int(counts[k]) - 1)
            delta[k], blocks_left = 1 + extra, blocks_left - extra
        link = link_s[devices].tolist()
        stages = stage_time(np.array(delta)[devices], teb_s[devices], link_s[devices]).tolist()
        seconds = pipeline_latency_paper(stages, link, int(self._m[m]), self._instance.tail)
        return SegmentChoice(tuple(delta), int(self._m[m]), None, seconds)


def _with_tail(cases: StageCases, size: Index, rounds: Array, least: Array) -> tuple[Array, Array, Index]:
    """Least D = (S + m - 1) T - tau_q, its T and its q, (C,) each.

    Parameters
    ----------
    rounds : (C,), S + m - 1
    least : (C,), the least T of any devices, finite
    """
    # Some device has the largest tau at the least T of all.
    tails = np.where(cases.members(least, size), cases.link_s, -np.inf)
    forced, tail = np.argmax(tails, axis=1), np.max(tails, axis=1)
    seconds, bottleneck = rounds * least - tail, least.copy()
    # A device with a larger tau needs a larger T; few come in time to be worth it.
    largest = cases.link_s.max(axis=1)
    doubtful = np.flatnonzero(largest > tail)
    late = cases.at(doubtful)
    latest = (seconds[doubtful] + largest[doubtful]) / rounds[doubtful]
    candidates = late.members(latest, size[doubtful]) & (late.link_s > tail[doubtful][:, None])
    row, q = np.nonzero(candidates)
    row = doubtful[row]
    own_tail = cases.link_s[row, q]
    own_least = cases.at(row).least_with(size[row], q)
    value = rounds[row] * own_least - own_tail
    order = np.lexsort((-value, row))  # the best of a row is written last
    order = order[value[order] < seconds[row[order]]]
    row, q = row[order], q[order]
    seconds[row], bottleneck[row], forced[row] = value[order], own_least[order], q
    return seconds, bottleneck, forced
