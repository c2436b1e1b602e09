"""Branch and bound on the deadline of a round.

F(T) = V T + the cheapest matching under the deadline T has many local minima. On an interval, replace the cost of every
option by a tangent (:mod:`strategies.dssda.deadline`: it is convex). The cheapest matching under linear costs is
concave in T, so with V T added it is least at an end: two assignment problems bound F from below on the whole interval,
with an error that falls with the square of the interval's width.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from strategies.dssda.deadline import Options

INTERVAL_LIMIT = 10_000
"""Intervals looked at before the proof is given up."""


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
    """Whether it does so at ``first``."""


class IntervalBound(NamedTuple):
    """Below the cost of every deadline of an interval."""

    bound: float
    taken: Options
    """The assignment that attains it, under tangents."""
    at_first: bool
    """Whether it does so at the interval's first deadline."""


def bound_interval(options: Options, weight: float, first: float, last: float, touch: float) -> IntervalBound | None:
    """Bound F(T) = V T + the cheapest matching from below, for all T with first <= T < last.

    Parameters
    ----------
    options : those that are possible in the interval
    weight : V [1/s]
    first, last : ends of the interval [s]
    touch : deadline of the tangents [s]

    Returns
    -------
    None if no assignment is possible in the interval.
    """
    at_first, at_last = options.tangents(touch, (first, last))
    matchings = options.match(at_first), options.match(at_last)
    if matchings[0] is None or matchings[1] is None:
        return None
    bounds = weight * first + matchings[0].cost, weight * last + matchings[1].cost
    is_first = bounds[0] <= bounds[1]
    taken = options.taken(*((matchings[0], at_first) if is_first else (matchings[1], at_last)))
    return IntervalBound(min(bounds), taken, is_first)


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

    def run(self, options: Options) -> None:
        """Search all options, of which some assignment must be possible."""
        costs = options.costs(np.inf)
        without_deadline = options.match(costs)
        assert without_deadline is not None
        self._least_cost = without_deadline.cost
        if self._weight == 0.0:
            self.taken = options.taken(without_deadline, costs)
            self.objective = self.bound = self._least_cost
            return
        first = options.least_deadline()
        self._descend(options, first)
        options = options.useful(first, self._last_deadline())
        for deadline in np.geomspace(1.0, 1e-3, 5) * (self._last_deadline() - first) + first:
            self._descend(options, float(deadline))
        heap: list[_Interval] = []
        self._push(heap, options, first, self._last_deadline(), -np.inf)
        proven = np.inf
        while heap:
            node = heapq.heappop(heap)
            # A tenth of the tolerance is left to rounding.
            target = self.objective - 0.9 * self._tolerance * abs(self.objective)
            if node.bound >= target or self.num_intervals >= INTERVAL_LIMIT:
                proven = min(proven, node.bound)
                break
            self._improve(node.taken)
            middle = self._middle(node)
            if not node.first < middle < node.last:
                proven = min(proven, node.bound)
                continue
            self._push(heap, node.options, node.first, middle, node.bound)
            self._push(heap, node.options, middle, node.last, node.bound)
        self.bound = min(proven, self.objective)

    def _last_deadline(self) -> float:
        """From here on, V T and the cost of a matching without any deadline exceed the best objective."""
        return (self.objective - self._least_cost) / self._weight * (1 + 1e-9) + 1e-9

    def _middle(self, node: _Interval) -> float:
        """Where to cut an interval."""
        if node.first < self.deadline < node.last:
            return self.deadline
        if node.at_first:
            # The bound counts options before they begin. Cut at the median beginning: to its left half of them are
            # gone, to its right half of them have begun.
            begins = np.sort(node.taken.earliest[node.taken.earliest > node.first])
            if len(begins):
                return float(begins[len(begins) // 2])
        return node.first + (node.last - node.first) / 2

    def _push(self, heap: list[_Interval], options: Options, first: float, last: float, at_least: float) -> None:
        """Bound an interval from below, unless no assignment is possible in it."""
        self.num_intervals += 1
        options = options.useful(first, last)
        # Tangents at the best deadline are exact there, which closes the gap around it.
        touch = self.deadline if first <= self.deadline <= last else first + (last - first) / 2
        below = bound_interval(options, self._weight, first, last, touch)
        if below is None:
            return
        bound = max(below.bound, at_least)
        heapq.heappush(heap, _Interval(bound, self.num_intervals, first, last, options, below.taken, below.at_first))

    def _descend(self, options: Options, deadline: float) -> None:
        """Best matching at the deadline, best deadline of the matching, and so on as long as that improves."""
        while True:
            costs = options.costs(deadline)
            matching = options.match(costs)
            if matching is None or not self._improve(options.taken(matching, costs)):
                return
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
