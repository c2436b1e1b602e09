"""A band divided for delay alone: the least deadline, by bisection, exact.

To upload D_t within t a control unit needs the rate R = D_t / t. C6 and C8 then allow the power min(Pmax, R Emax /
D_e), and the least band B solves B log2(1 + p h / (I + B N0)) = R; it rises with R. A deadline can be met if the
clusters that need least in sum, each on a channel of its own, need no more than there is: an assignment problem. What
is needed falls as the deadline rises, so bisection finds the least deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels

_ROUNDING = 1e-9


class DividedBand(NamedTuple):
    """The least deadline, and what it takes."""

    deadline: float
    """[s]."""
    infeasible_deadline: float
    """A deadline just before it, which no division can meet [s]."""
    channel_of: tuple[int | None, ...]
    """(N,)."""
    choices: tuple[SegmentChoice | None, ...]
    """(N,)."""
    band_hz: Array
    """(N,), that of a cluster without a channel is 0; in sum the whole band [Hz]."""


def delay_alone(instance: Instance) -> bool:
    """Return whether the round's latency alone costs: every second has a price, and no hertz."""
    free = all(c.wS == c.wS2 == c.wP == c.wE == c.wG == 0.0 and c.up.eps_max is None for c in instance.clusters)
    everyone = instance.num_clusters <= instance.num_channels or len({c.skip for c in instance.clusters}) == 1
    return free and everyone and instance.wJ == 0.0 and instance.V > 0


def divide_for_delay(
    instance: Instance, offered: Sequence[Sequence[SegmentChoice]], band_hz: float, deadline: float
) -> DividedBand:
    """Divide a band so that the slowest cluster of the round ends as early as possible.

    Parameters
    ----------
    offered : (N,), the segments that each cluster can choose from
    band_hz : to divide [Hz]
    deadline : one that some division meets [s]
    """
    need = _Need(instance, offered, band_hz)
    # One cluster needs the whole band for it, and may seem to need more by what rounding leaves of a short upload.
    low, high = 0.0, deadline * (1 + _ROUNDING)
    for _ in range(200):
        middle = low + (high - low) / 2
        if not low < middle < high or high - low <= 1e-12 * high:
            break
        low, high = (low, middle) if need.sum_at(middle) <= band_hz else (middle, high)
    matched = need.at(high)
    assert matched is not None
    channel_of, rows, bands = matched
    choices = tuple(None if row is None else need.choice(n, row) for n, row in enumerate(rows))
    # What is left over goes to all in proportion: nobody is slower with more.
    return DividedBand(high, low, channel_of, choices, bands * band_hz / bands.sum())


class _Need:
    """Hertz that each of all clusters' C choices needs on each channel, for a deadline: (C, J)."""

    def __init__(self, instance: Instance, offered: Sequence[Sequence[SegmentChoice]], band_hz: float) -> None:
        self._instance, self._offered, self._band = instance, offered, band_hz
        self._first = np.cumsum([0, *(len(choices) for choices in offered)])
        flat = [(n, choice) for n, choices in enumerate(offered) for choice in choices]
        self._pipeline = instance.steps * np.array([choice.pipeline_s for _, choice in flat])
        self._bits = np.array([instance.upload_bits(n, choice.m) for n, choice in flat])
        clusters = [instance.clusters[n] for n, _ in flat]
        self._gain = np.array([c.h for c in clusters])
        self._interference = np.array([c.I for c in clusters])
        self._most_w = np.array([c.up.Pmax for c in clusters])[:, None]
        with np.errstate(divide="ignore"):
            self._watt_per_rate = np.array([np.float64(c.up.Emax) / c.up.e_bits for c in clusters])[:, None]

    def choice(self, n: int, row: int) -> SegmentChoice:
        """The choice of a cluster that stands in a row."""
        return self._offered[n][row - int(self._first[n])]

    def sum_at(self, deadline: float) -> float:
        """Least sum that min(N, J) clusters need; inf if too few can meet the deadline at all."""
        matched = self.at(deadline)
        return np.inf if matched is None else float(matched[2].sum())

    def at(self, deadline: float) -> tuple[tuple[int | None, ...], list[int | None], Array] | None:
        """Channels, rows of the choices and hertz of each cluster, (N,) each, in the cheapest assignment."""
        hertz = self._hertz(deadline)
        num_clusters = len(self._offered)
        least = np.full((num_clusters, hertz.shape[1]), np.inf)
        rows = np.zeros(least.shape, dtype=np.intp)
        for n in range(num_clusters):
            part = hertz[self._first[n] : self._first[n + 1]]
            if len(part):
                rows[n] = self._first[n] + np.argmin(part, axis=0)
                least[n] = np.min(part, axis=0)
        matching = match_channels(least, np.zeros(num_clusters))
        if matching is None:
            return None
        channel_of = matching.channel_of
        bands = np.array([0.0 if j is None else least[n, j] for n, j in enumerate(channel_of)])
        return channel_of, [None if j is None else int(rows[n, j]) for n, j in enumerate(channel_of)], bands

    def _hertz(self, deadline: float) -> Array:
        left = deadline - self._pipeline
        rate = np.where(left > 0, self._bits / np.where(left > 0, left, 1.0), np.inf)[:, None]
        finite = np.where(np.isfinite(rate), rate, 0.0)
        power = np.minimum(self._most_w, np.where(finite > 0, finite * self._watt_per_rate, self._most_w))
        signal = power * self._gain

        def enough(band: Array) -> NDArray[np.bool_]:
            noise = self._interference + band * self._instance.N0
            return np.asarray(band * np.log1p(signal / noise) >= finite * np.log(2.0))

        low, high = np.zeros(signal.shape), np.full(signal.shape, self._band)
        possible = enough(high) & np.isfinite(rate)
        for _ in range(60):
            middle = low + (high - low) / 2
            is_enough = enough(middle)
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return np.where(possible, high, np.inf)
