"""A learning rate by its score: a base times 1/3, 1 and 3, and further where the best lies at an edge."""

from __future__ import annotations

import math
from collections.abc import Callable

FACTOR = 3.0


def best_rate(base: float, farthest: int, score_of: Callable[[float], float]) -> float:
    """Return the rate of the highest score; of equal ones the first that was tried, which begins with the base.

    Parameters
    ----------
    base : the rate in the middle
    farthest : powers of :data:`FACTOR` that the search may go to either side, at least 1; 0: the base alone
    score_of : trains with a rate; ``-inf`` or NaN where it diverges

    Example
    -------
    >>> best_rate(1.0, 3, lambda rate: -abs(rate - 10.0))
    9.0
    """
    scores: dict[int, float] = {}

    def try_power(power: int) -> None:
        score = score_of(base * FACTOR**power)
        scores[power] = -math.inf if math.isnan(score) else score

    try_power(0)
    if farthest:
        try_power(-1)
        try_power(1)
    while True:
        best = max(scores, key=scores.__getitem__)
        beyond = best + 1 if best == max(scores) else best - 1 if best == min(scores) else best
        if abs(beyond) > farthest or beyond in scores:
            return base * FACTOR**best
        try_power(beyond)
