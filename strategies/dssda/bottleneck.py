"""The least bottleneck of a pipeline: the T at which S stages hold L TEBs. Exact, for every S from one ranking.

For a bottleneck T device k may hold c_k(T) = min(cap_k, floor((T - tau_k) / a_k)) TEBs, and T works for S segments when
the S largest c_k are at least 1 and sum to at least L. That needs no search among the 2^K sets of devices, nor one over
T. Sort, for each j, the times j a_k + tau_k at which a device has room for j TEBs:

    j = 1:   t(1,1) <= t(2,1) <= ... <= t(K,1)
    j = 2:   t(1,2) <= t(2,2) <= ...

At T the i-th largest c_k is the number of j with t(i,j) <= T, so the S largest sum to the number of t(i,j) <= T with
i <= S. The least T is the L-th smallest of these times; or t(S,1), the time at which S devices hold one, if that is
later. And i j of the times are no later than t(i,j): only those with i j <= L can be among the L smallest, about L ln L
in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array

Index = NDArray[np.intp]
ROUNDING = 1e-13
"""Relative: a T that is a stage time itself must admit that stage in spite of rounding."""


@dataclass(frozen=True)
class StageCases:
    """Cases to decide, (C, K) each: the devices' times and caps for one m of one cluster."""

    teb_s: Array
    """a_k [s]."""
    link_s: Array
    """tau_k [s]."""
    cap: Array
    """Most TEBs."""
    num_blocks: int
    """L."""

    def at(self, rows: Index) -> StageCases:
        """Some of the cases, or some of them several times."""
        return StageCases(self.teb_s[rows], self.link_s[rows], self.cap[rows], self.num_blocks)

    def counts(self, bottleneck: Array) -> Array:
        """c_k(T) for a T of each case, (C, K)."""
        room = (bottleneck[:, None] * (1 + ROUNDING) - self.link_s) / self.teb_s
        return np.minimum(np.floor(room), self.cap).clip(0.0)

    def members(self, bottleneck: Array, size: Index) -> NDArray[np.bool_]:
        """Find the devices that may be among the S of each case at its T, (C, K)."""
        counts, rows = self.counts(bottleneck), np.arange(len(size))
        ranked = -np.sort(-counts, axis=1)
        smallest = ranked[rows, size - 1]
        spare = np.cumsum(ranked, axis=1)[rows, size - 1] - self.num_blocks
        # A device outside the S largest takes the place of the smallest of them.
        short = np.maximum(smallest[:, None] - counts, 0.0)
        return np.asarray((smallest[:, None] - short >= 1) & (spare[:, None] - short >= 0))

    def least(self, row: Index, size: Index) -> Array:
        """The least T that works, for pairs of a case and a number of segments S; inf where none does.

        Parameters
        ----------
        row, size : (R,)
        """
        times, rank = self._ranked_times()
        least = np.full(len(row), np.inf)
        for S in np.unique(size):  # noqa: N806
            places, columns = np.flatnonzero(size == S), np.flatnonzero(rank < S)
            if len(columns) >= self.num_blocks:
                among = times[np.ix_(row[places], columns)]
                enough = np.partition(among, self.num_blocks - 1, axis=1)[:, self.num_blocks - 1]
                least[places] = np.maximum(enough, times[row[places], S - 1])
        return least

    def least_with(self, size: Index, device: Index) -> Array:
        """The least T that works with a given device among the S, (C,); inf where none does.

        Parameters
        ----------
        size, device : (C,), of each case
        """
        rows = np.arange(len(size))
        counts = np.arange(1, self.num_blocks + 1)
        its_times = counts * self.teb_s[rows, device][:, None] + self.link_s[rows, device][:, None]
        its_times[counts > self.cap[rows, device][:, None]] = np.inf
        others_cap = self.cap.copy()
        others_cap[rows, device] = 0.0
        times, rank = StageCases(self.teb_s, self.link_s, others_cap, self.num_blocks)._ranked_times()
        present = np.where(size > 1, times[rows, np.maximum(size - 2, 0)], its_times[:, 0])
        times[rank >= size[:, None] - 1] = np.inf
        enough = np.partition(np.hstack([its_times, times]), self.num_blocks - 1, axis=1)[:, self.num_blocks - 1]
        return np.maximum(enough, np.maximum(its_times[:, 0], present))

    def _ranked_times(self) -> tuple[Array, Index]:
        """The t(i,j) with i j <= L of each case, (C, E), those of j = 1 first; and i - 1 of each column, (E,)."""
        num_devices = self.teb_s.shape[1]
        times, ranks = [], []
        for j in range(1, max(1, min(self.num_blocks, int(np.max(self.cap, initial=0)))) + 1):
            held = np.where(self.cap >= j, j * self.teb_s + self.link_s, np.inf)
            kept = min(num_devices, self.num_blocks // j)
            times.append(np.sort(held, axis=1)[:, :kept])
            ranks.append(np.arange(kept))
        return np.hstack(times), np.concatenate(ranks)
