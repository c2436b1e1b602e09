"""Segments when joules have a price: every choice that no other beats in both time and joules.

A price on a device's joules ties the TEBs to the devices by more than the slowest stage, so the ranking of
:mod:`strategies.dssda.bottleneck` does not answer it, and between a fast and a frugal choice the round's deadline
decides. All ways to spread L TEBs over the K devices within their memory are looked at, for every m and, where that
matters, every last device, as columns of numbers: milliseconds to seconds for a cluster, and exact under both forms of
the latency.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.energy import block_energy
from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

Spread = NDArray[np.int8]
MOST_SPREADS = 300_000
"""Ways to spread the TEBs over the devices of a cluster that are looked at."""


def priced_choices(instance: Instance, limits: Limits) -> list[SegmentChoice]:
    """Choices of a cluster of which no other has fewer joules in no more time, with no larger S and upload.

    Parameters
    ----------
    limits : of the cluster, over the instance's ``m_set``

    Raises
    ------
    ValueError
        If there are more than :data:`MOST_SPREADS` ways to spread the TEBs.
    """
    return _Cluster(instance, limits).front()


class _Cluster:
    """All spreads of one cluster's TEBs: rows are spreads (P), columns devices (K)."""

    def __init__(self, instance: Instance, limits: Limits) -> None:
        self._instance, self._limits = instance, limits
        sizes = instance.segment_range(limits.cluster)
        caps = tuple(int(cap) for cap in limits.largest.max(axis=0)) if sizes else ()
        spreads = _spreads(instance.L, caps, limits.cluster)
        busy = (spreads > 0).sum(axis=1)
        self._spreads = spreads[np.isin(busy, np.array(sizes, dtype=np.intp))]
        self._busy = self._spreads > 0
        self._num_segments = self._busy.sum(axis=1)
        cluster = instance.clusters[limits.cluster]
        self._size_cost = np.array([cluster.size_cost(int(s)) for s in range(len(caps) + 1)])[self._num_segments]

    def front(self) -> list[SegmentChoice]:
        """For each m by itself where the upload depends on it, otherwise over all."""
        rows: list[tuple[float, float, int, int, int | None]] = []
        if not len(self._spreads):
            return []
        for at in range(len(self._instance.m_set)):
            lasts = range(self._spreads.shape[1]) if self._instance.names_last else [None]
            of_m = [entry for last in lasts for entry in self._undominated(at, last)]
            rows += _front(of_m)
        rows = rows if self._instance.m_decides_upload else _front(rows)
        return [self._choice(seconds, row, at, last) for seconds, _, row, at, last in rows]

    def _undominated(self, at: int, last: int | None) -> list[tuple[float, float, int, int, int | None]]:
        """The front of one m and last device: D, cost, spread, place of m, last."""
        x, m = self._limits, self._instance.m_set[at]
        is_last = np.arange(self._spreads.shape[1]) == (-1 if last is None else last)
        allowed = np.all(self._spreads <= np.where(is_last, x.last_cap[at], x.cap[at]), axis=1)
        if last is not None:
            allowed &= self._busy[:, last]
        rows = np.flatnonzero(allowed)
        if not len(rows):
            return []
        blocks, busy = self._spreads[rows], self._busy[rows]
        flow_shop = self._instance.latency == "flowshop"
        link = np.where(is_last & flow_shop, 0.0, x.link_s[at])
        stages = np.where(busy, blocks * x.teb_s[at] + link, 0.0)
        slowest = stages.max(axis=1)
        if flow_shop:
            seconds = stages.sum(axis=1) + (m - 1) * slowest
        else:
            saved = np.where(busy, x.link_s[at], 0.0).max(axis=1) if self._instance.tail == "last" else 0.0
            seconds = (self._num_segments[rows] + m - 1) * slowest - saved
        cost = self._size_cost[rows] + self._instance.wJ * self._joules(at, blocks, busy, is_last)
        order = np.lexsort((cost, seconds))
        least = np.minimum.accumulate(cost[order])
        kept = order[np.concatenate([[True], least[1:] < least[:-1]])]
        return [(float(seconds[i]), float(cost[i]), int(rows[i]), at, last) for i in kept]

    def _joules(self, at: int, blocks: Spread, busy: NDArray[np.bool_], is_last: NDArray[np.bool_]) -> Array:
        """Joules of all local steps, (P,)."""
        instance, m = self._instance, self._instance.m_set[at]
        d = instance.device_arrays(self._limits.cluster)
        per_block = block_energy(instance.work(m), d.phi, d.f, d.kappa)
        sending = np.where(is_last & instance.names_last, 0.0, d.p * self._limits.link_s[at])
        return instance.steps * m * np.asarray(blocks @ per_block + busy @ sending)

    def _choice(self, seconds: float, row: int, at: int, last: int | None) -> SegmentChoice:
        delta = tuple(int(blocks) for blocks in self._spreads[row])
        return SegmentChoice(delta, self._instance.m_set[at], last, seconds)


def _front(
    entries: list[tuple[float, float, int, int, int | None]],
) -> list[tuple[float, float, int, int, int | None]]:
    """Those with a lower cost than all that are no slower."""
    kept, least = [], np.inf
    for entry in sorted(entries, key=lambda entry: entry[:4]):
        if entry[1] < least:
            kept.append(entry)
            least = entry[1]
    return kept


@lru_cache(maxsize=64)
def _spreads(num_blocks: int, caps: tuple[int, ...], cluster: int) -> Spread:
    """All ways to give each device from 0 to its cap TEBs, ``num_blocks`` in all, (P, K)."""
    partial = np.zeros((1, 0), dtype=np.int8)
    for k, cap in enumerate(caps):
        room = sum(caps[k + 1 :])
        parts = []
        for blocks in range(min(cap, num_blocks) + 1):
            total = partial.sum(axis=1) + blocks
            fits = partial[(total <= num_blocks) & (total + room >= num_blocks)]
            parts.append(np.hstack([fits, np.full((len(fits), 1), blocks, dtype=np.int8)]))
        partial = np.vstack(parts)
        if len(partial) > MOST_SPREADS:
            raise ValueError(
                f"cluster {cluster}: a price of energy looks at all ways to spread the TEBs over the devices; "
                f"expected at most {MOST_SPREADS:,}, found more for {num_blocks} TEBs on {len(caps)} devices; drop "
                "planner.energy-price, or plan with fewer devices or TEBs in a cluster"
            )
    return partial if caps and sum(caps) >= num_blocks else partial[:0].reshape(0, len(caps))
