"""A band that the matched clusters divide: who gets how many hertz, beside all that a round decides.

For delay alone the division is exact (:mod:`strategies.dssda.least_band`). Where power, distortion or joules cost
something, the band changes these costs, too. A price mu per hertz then separates the clusters: with rent mu B in the
cost of every (cluster, channel, S, B), the round is that of :mod:`strategies.dssda.branching`, and

    L(mu) = min over decisions of V T + costs + sum mu B  -  mu W

is below the cost of every division of the band W, at any price. Bisection finds the price at which the clusters want
what there is; their bands, scaled to W, are planned exactly, and the bands that are tried next lie close around them.

For the bound, bands are intervals: a cluster pays for an interval's lower end and sends as with its upper one. So what
the bound leaves open is the duality gap and the width of the intervals; the answer's gap tells both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, SegmentChoice, Status
from strategies.dssda.branching import DeadlineSearch
from strategies.dssda.deadline import Options
from strategies.dssda.instance import Instance
from strategies.dssda.least_band import delay_alone, divide_for_delay
from strategies.dssda.power import Uplinks, largest_within_budget

_ROUNDS = 3
"""Times that bands are tried around the best so far."""
_STEPS = 12
"""Halvings of a price."""
_NEAREST = 3e-4
"""Share of a band by which the nearest band that is tried differs."""
_FARTHER, _BOUND_FARTHER = 1.7, 1.25
"""By how much farther the next one is: where bands are looked for, and in the bound."""
_ALMOST_NONE = 1e-6
"""Least band that is tried, as a share of all."""
PlanWithBands = Callable[[Instance, Collection[int]], Answer]
"""The certified plan where every channel has a band of its own and some clusters alone may be matched."""


def divided(instance: Instance, answer: Answer) -> Instance:
    """The problem with the bands that an answer gives to its clusters; the same one where none is divided."""
    bands = [part.band_hz for part in answer.clusters]
    if instance.band_hz is None or not any(bands):
        return instance
    return _with_bands(instance, np.array([b or c.B[0] for b, c in zip(bands, instance.clusters, strict=True)]))


def plan_split_band(
    instance: Instance, offered: Sequence[Sequence[SegmentChoice]], plan: PlanWithBands, tolerance: float
) -> Answer:
    """Plan a round whose matched clusters divide the band ``instance.band_hz``.

    Parameters
    ----------
    offered : (N,), the segments that each cluster can choose from
    plan : of a division
    tolerance : relative gap at which the answer counts as optimal

    Returns
    -------
    ``optimal`` within the tolerance of the bound, otherwise ``feasible`` with its gap; ``infeasible`` where even parts
    of the band leave some cluster without a feasible power.
    """
    assert instance.band_hz is not None
    band, count = instance.band_hz, instance.num_clusters
    # Start: even parts.
    even = np.full(count, band / instance.num_matched)
    best, bands = plan(_with_bands(instance, even), range(count)), even
    if best.status == "infeasible":
        return best
    assert best.latency_s is not None and best.objective is not None
    if delay_alone(instance):
        division = divide_for_delay(instance, offered, band, best.latency_s)
        bands = np.where(division.band_hz > 0, division.band_hz, even)
        chosen = plan(_with_bands(instance, bands), [n for n, b in enumerate(division.band_hz) if b > 0])
        skipped = sum(c.skip for c, j in zip(instance.clusters, division.channel_of, strict=True) if j is None)
        bound = instance.V * division.infeasible_deadline + skipped
        better = chosen.objective is not None and chosen.objective <= best.objective
        return _answered(chosen if better else best, bands if better else even, bound, tolerance)
    search = _PriceSearch(instance, offered)
    price, objective = 0.0, best.objective
    for _ in range(_ROUNDS):
        price, wanted = search.price(search.grid(best, bands, _FARTHER), price)
        candidates = [w / w.sum() * band for w in wanted if w.sum() > 0]
        before = objective
        for candidate in candidates:
            tried = np.where(candidate > 0, candidate, band / instance.num_matched)
            answer = plan(_with_bands(instance, tried), [n for n, b in enumerate(candidate) if b > 0])
            if answer.objective is not None and answer.objective < objective:
                best, bands, objective = answer, tried, answer.objective
        if before - objective <= 1e-7 * abs(objective):
            break
    bound = search.bound(search.grid(best, bands, _BOUND_FARTHER), price)
    return _answered(best, bands, bound, tolerance)


class _PriceSearch:
    """Prices of a hertz."""

    def __init__(self, instance: Instance, offered: Sequence[Sequence[SegmentChoice]]) -> None:
        assert instance.band_hz is not None
        self._instance, self._offered, self._band = instance, offered, instance.band_hz

    def grid(self, answer: Answer, bands: Array, farther: float) -> Array:
        """Ends of the intervals of each cluster's band, close to each other around the band so far, (N, Q) [Hz]."""
        offsets = [_NEAREST]
        while offsets[-1] < 1.0 / _ALMOST_NONE:
            offsets.append(offsets[-1] * farther)
        steps = np.array(offsets)
        rows = []
        for part, band in zip(answer.clusters, bands, strict=True):
            around = float(band) if part.selected else self._band / self._instance.num_matched
            below = around / (1.0 + steps[steps < 30.0])[::-1]
            ends = np.concatenate([below, [around], around * (1.0 + steps)])
            rows.append(np.clip(ends, _ALMOST_NONE * self._band, self._band))
        return np.array(rows)

    def price(self, grid: Array, guess: float) -> tuple[float, list[Array]]:
        """The price at which the clusters want what there is, and what they want just below and above it, (N,) each.

        Parameters
        ----------
        guess : a price near it; 0 where none is known
        """
        uplinks = self._uplinks(grid, grid)
        low, high = guess / 1.3, guess * 1.3 or self._instance.V / self._band
        wanted_low = self._wanted(uplinks, grid, low)
        if wanted_low.sum() <= self._band and low > 0.0:
            high, low = low, 0.0
            wanted_low = self._wanted(uplinks, grid, low)
        if wanted_low.sum() <= self._band:
            return 0.0, [wanted_low]
        while (wanted_high := self._wanted(uplinks, grid, high)).sum() > self._band and high < 1e12:
            low, wanted_low, high = high, wanted_high, high * 8.0
        for _ in range(_STEPS):
            if abs(wanted_low.sum() - wanted_high.sum()) <= 2 * _NEAREST * self._band:
                break
            middle = low + (high - low) / 2
            wanted = self._wanted(uplinks, grid, middle)
            if wanted.sum() > self._band:
                low, wanted_low = middle, wanted
            else:
                high, wanted_high = middle, wanted
        return high, [wanted_low, wanted_high]

    def bound(self, grid: Array, price: float) -> float:
        """L(mu): no division of the band costs less."""
        nothing = np.zeros((len(grid), 1))
        lower, upper = np.hstack([nothing, grid[:, :-1]]), grid
        # An interval's own noise is that of its lower end, its rate that of its upper one.
        search = self._search(self._uplinks(lower, upper), lower, price)
        return search.bound - price * self._band

    def _wanted(self, uplinks: Uplinks, grid: Array, price: float) -> Array:
        taken = self._search(uplinks, grid, price).taken
        assert taken is not None
        bands, num_levels = np.zeros(len(grid)), grid.shape[1]
        for n, row in zip(taken.cluster, taken.row, strict=True):
            bands[n] = grid[n, row % num_levels]
        return bands

    def _search(self, uplinks: Uplinks, paid: Array, price: float) -> DeadlineSearch:
        rent = np.broadcast_to(price * paid[:, None, :], uplinks.k.shape)
        search = DeadlineSearch(self._instance.V, 1e-6)
        search.run(Options.of(self._instance, self._offered, uplinks, rent))
        return search

    def _uplinks(self, lower: Array, upper: Array) -> Uplinks:
        """Uplinks with the noise of one band and the rate of another, (N, J, Q)."""
        columns = []
        for q in range(lower.shape[1]):
            noisy = np.maximum(lower[:, q], _ALMOST_NONE * self._band * 1e-6)
            u = Uplinks.of(_with_bands(self._instance, noisy))
            faster = (noisy / upper[:, q])[:, None]
            columns.append(replace(u, k=u.k * faster, per_bit=u.per_bit * faster, e0=u.e0 * faster))
        all_bands = Uplinks(**{name: np.stack([getattr(u, name) for u in columns], axis=2) for name in vars(u)})
        budget = np.array([c.up.Emax for c in self._instance.clusters])[:, None, None]
        high = largest_within_budget(all_bands.capped, all_bands.e0, np.broadcast_to(budget, all_bands.e0.shape))
        return replace(all_bands, high=high)


def _with_bands(instance: Instance, bands: Array) -> Instance:
    """Every channel of a cluster with its band, and none left to divide."""
    clusters = tuple(replace(c, B=(float(b),) * len(c.B)) for c, b in zip(instance.clusters, bands, strict=True))
    return replace(instance, clusters=clusters, band_hz=None)


def _answered(answer: Answer, bands: Array, bound: float, tolerance: float) -> Answer:
    """The answer with its bands and the bound of all divisions."""
    assert answer.objective is not None
    bound = min(bound, answer.objective)
    proved = answer.objective - bound <= tolerance * max(abs(answer.objective), 1e-12)
    status: Status = "optimal" if proved else "feasible"
    parts = tuple(
        replace(p, status=status, band_hz=float(b) if p.selected else None)
        for p, b in zip(answer.clusters, bands, strict=True)
    )
    return replace(answer, status=status, clusters=parts, lower_bound=bound)
