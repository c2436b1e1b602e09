"""Branch and bound on the deadline of a round.

F(T) = V T + the cheapest matching under the deadline T has many local minima. On an interval, replace the cost of every
option by a tangent (:mod:`strategies.dssda.deadline`: it is convex). The cheapest matching under linear costs is
concave in T, so with V T added it is least at an end: two assignment problems bound F from below on the whole interval,
with an error that falls with the square of the interval's width. In a large round the prices of the best matching's
channels bound both ends first (:mod:`strategies.dssda.prices`); an end is matched only where they leave room.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.deadline import Options
from strategies.dssda.prices import PricedMatching, match_at_prices, price_bound

INTERVAL_LIMIT = 10_000
"""Intervals looked at before the proof is given up."""
_FIRST_INTERVALS = 4
"""Parts into which the deadlines of a large round are cut before the search."""


@dataclass(order=True)
class _Interval:
    """Deadlines T with first <= T < last."""

    bound: float
    """No deadline of the interval makes a cheaper round."""
    number: int
    first: float = field(compare=False)
    last: float = field(compare=False)
    options: Options = field(compare=False)
    taken: Options = field(compare=False)
    """The assignment that attains the bound, under tangents."""
    at_first: bool = field(compare=False)
    """True if it attains the bound at ``first``."""
    prices: Array | None = field(compare=False)
    """Prices of the channels in it."""


class IntervalBound(NamedTuple):
    """Below the cost of every deadline of an interval."""

    bound: float
    taken: Options | None
    """The assignment that attains it, under tangents; None if prices alone make the bound high enough."""
    at_first: bool
    """True if it attains the bound at the interval's first deadline."""
    prices: Array | None
    """Prices of the channels in that assignment."""


def bound_interval(
    options: Options,
    weight: float,
    first: float,
    last: float,
    touch: float,
    *,
    prices: Array | None = None,
    enough: float = np.inf,
) -> IntervalBound | None:
    """Bound F(T) = V T + the cheapest matching from below, for all T with first <= T < last.

    Parameters
    ----------
    options : those that are possible in the interval
    weight : V [1/s]
    first, last : ends of the interval [s]
    touch : deadline of the tangents [s]
    prices : of the channels in a similar matching: they bound both ends at once, and only what they leave is matched
    enough : a bound so high needs no assignment

    Returns
    -------
    None if no assignment is possible in the interval.
    """
    ends, costs = (first, last), options.tangents(touch, (first, last))
    tables = [options.table(at_end) for at_end in costs]
    bounds, cheapest = [-np.inf, -np.inf], dict[int, PricedMatching]()
    if prices is not None:
        bounds = [
            weight * end + price_bound(table, options.skip, prices) for end, table in zip(ends, tables, strict=True)
        ]
        if min(bounds) >= enough:
            return IntervalBound(min(bounds), None, False, prices)
    while (lower := int(bounds[1] < bounds[0])) not in cheapest:
        matched = match_at_prices(tables[lower], options.skip, prices)
        if matched is None:
            return None
        cheapest[lower], bounds[lower] = matched, weight * ends[lower] + matched.bound
    taken = options.taken(cheapest[lower], costs[lower])
    return IntervalBound(min(bounds), taken, lower == 0, cheapest[lower].prices)


class DeadlineSearch:
    """Best-first branch and bound. After :meth:`run`, the best assignment and a bound below all others.

    Parameters
    ----------
    weight : V [1/s]
    tolerance : relative gap at which to stop
    """

    def __init__(self, weight: float, tolerance: float) -> None:
        self.taken: Options | None = None
        """Options of the best assignment so far, one for each matched cluster."""
        self.deadline = np.inf
        """Its best deadline [s]."""
        self.objective = np.inf
        self.bound = -np.inf
        """No decision costs less."""
        self.num_intervals = 0
        self._weight, self._tolerance = weight, tolerance
        self._least_cost = -np.inf
        self._prices: Array | None = None
        self._proven = np.inf

    def run(self, options: Options) -> None:
        """Search all options, of which some assignment must be possible."""
        costs = options.costs(np.inf)
        without_deadline = options.match(costs)
        assert without_deadline is not None
        self._least_cost = without_deadline.bound
        if self._weight == 0.0:
            self.taken = options.taken(without_deadline, costs)
            self.objective, self.bound = without_deadline.matching.cost, self._least_cost
            return
        self._prices = without_deadline.prices
        first = options.least_deadline()
        self._descend(options, first)
        options = options.useful(first, self._last_deadline())
        for deadline in np.geomspace(1.0, 1e-3, 5) * (self._last_deadline() - first) + first:
            self._descend(options, float(deadline))
        heap: list[_Interval] = []
        # Most options of a large round are useful in a part of the deadlines only: all of them at once would be slow.
        parts = 1 if self._prices is None else _FIRST_INTERVALS
        for ends in pairwise(np.linspace(first, self._last_deadline(), parts + 1).tolist()):
            self._push(heap, options, ends, -np.inf, self._prices)
        proven = np.inf
        while heap:
            node = heapq.heappop(heap)
            if node.bound >= self._target() or self.num_intervals >= INTERVAL_LIMIT:
                proven = min(proven, node.bound)
                break
            self._improve(node.taken)
            middle = self._middle(node)
            if not node.first < middle < node.last:
                proven = min(proven, node.bound)
                continue
            self._push(heap, node.options, (node.first, middle), node.bound, node.prices)
            self._push(heap, node.options, (middle, node.last), node.bound, node.prices)
        self.bound = min(proven, self._proven, self.objective)

    def _target(self) -> float:
        """A bound that is high enough; a tenth of the tolerance is left to rounding."""
        return self.objective - 0.9 * self._tolerance * abs(self.objective)

    def _last_deadline(self) -> float:
        """From here on, V T and the cost of a matching without any deadline exceed the best objective."""
        return (self.objective - self._least_cost) / self._weight * (1 + 1e-9) + 1e-9

    def _middle(self, node: _Interval) -> float:
        """Choose the deadline at which an interval is cut."""
        if node.first < self.deadline < node.last:
            return self.deadline
        if node.at_first:
            # The bound counts options before they begin. Cut at the median beginning: to its left half of them are
            # gone, to its right half of them have begun.
            begins = np.sort(node.taken.earliest[node.taken.earliest > node.first])
            if len(begins):
                return float(begins[len(begins) // 2])
        return node.first + (node.last - node.first) / 2

    def _push(
        self,
        heap: list[_Interval],
        options: Options,
        ends: tuple[float, float],
        at_least: float,
        prices: Array | None,
    ) -> None:
        """Bound an interval from below, unless no assignment is possible in it."""
        first, last = ends
        self.num_intervals += 1
        options = options.useful(first, last)
        # Tangents at the best deadline are exact there, which closes the gap around it.
        touch = self.deadline if first <= self.deadline <= last else first + (last - first) / 2
        below = bound_interval(options, self._weight, first, last, touch, prices=prices, enough=self._target())
        if below is None:
            return
        bound = max(below.bound, at_least)
        if below.taken is None:
            self._proven = min(self._proven, bound)
            return
        interval = _Interval(bound, self.num_intervals, first, last, options, below.taken, below.at_first, below.prices)
        heapq.heappush(heap, interval)

    def _descend(self, options: Options, deadline: float) -> None:
        """Best matching at the deadline, best deadline of the matching, and so on as long as that improves."""
        while True:
            costs = options.costs(deadline)
            cheapest = options.match(costs, self._prices)
            if cheapest is None or not self._improve(options.taken(cheapest, costs)):
                return
            self._prices = cheapest.prices
            deadline = self.deadline

    def _improve(self, taken: Options) -> bool:
        """Take an assignment at its best deadline if that is better than the best so far."""
        settled = taken.total(np.inf)
        if self._weight * float(np.max(taken.earliest)) + settled >= self.objective:
            return False
        deadline = taken.best_deadline(self._weight)
        objective = self._weight * deadline + taken.total(deadline)
        if objective >= self.objective:
            return False
        self.taken, self.deadline, self.objective = taken, deadline, objective
        return True
