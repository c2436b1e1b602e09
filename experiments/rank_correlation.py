"""Spearman's rank correlation within groups, with an exact test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np


def rank_correlation(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float]:
    """Mean of Spearman's coefficients of the groups, and the chance of one as far from 0 if nothing were behind it.

    Ranks are compared within a group alone: whatever else tells groups apart has no part in it. The chance is exact:
    all orders of the second values, in each group by itself, are counted.

    Parameters
    ----------
    groups : of each the two values of its members; at most eight members. Groups whose values are all the same of one
        kind are left out.

    Returns
    -------
    Coefficient in [-1, 1], and two-sided p; NaN and 1 where no group is left.

    Example
    -------
    >>> rank_correlation([([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])])
    (1.0, 0.3333333333333333)
    """
    coefficients: list[float] = []
    chances: Counter[float] = Counter({0.0: 1})
    for first, second in groups:
        x, y = _centred_ranks(first), _centred_ranks(second)
        scale = float(np.sqrt((x @ x) * (y @ y)))
        if scale == 0:
            continue
        coefficients.append(float(x @ y) / scale)
        of_group = Counter(round(float(x @ np.array(order)) / scale, 9) for order in permutations(y.tolist()))
        sums: Counter[float] = Counter()
        for total, ways in chances.items():
            for value, times in of_group.items():
                sums[round(total + value, 9)] += ways * times
        chances = sums
    if not coefficients:
        return float("nan"), 1.0
    extreme = abs(sum(coefficients)) - 1e-6
    p = sum(ways for total, ways in chances.items() if abs(total) >= extreme) / sum(chances.values())
    return sum(coefficients) / len(coefficients), p


def _centred_ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks minus their mean; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    ranks = np.array([np.sum(array < v) + (np.sum(array == v) - 1) / 2 for v in array])
    return ranks - ranks.mean()
