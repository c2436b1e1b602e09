"""The mean of paired differences, and the interval that holds it with 95 % by Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class PairedInterval(NamedTuple):
    """Differences of two methods, seed by seed."""

    mean: float
    """NaN without a pair."""
    low: float
    high: float
    """Without end for fewer than two pairs."""
    num_pairs: int

    @property
    def leaves_out_zero(self) -> bool:
        """Return True if the interval leaves out zero, so that the sign of the difference is known."""
        return self.low > 0 or self.high < 0


def paired_interval(
    first: Mapping[int, float], second: Mapping[int, float], confidence: float = 0.95
) -> PairedInterval:
    """Return the mean of ``first - second`` over the seeds that both have, and its interval.

    Parameters
    ----------
    first, second : values by seed
    confidence : of the interval, two-sided

    Example
    -------
    >>> paired_interval({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 1.0, 2: 2.0})
    PairedInterval(mean=1.0, low=1.0, high=1.0, num_pairs=3)
    """
    from scipy.stats import t

    differences = np.array([first[seed] - second[seed] for seed in first if seed in second])
    if len(differences) < 2:
        mean = float(differences[0]) if len(differences) else math.nan
        return PairedInterval(mean, -math.inf, math.inf, len(differences))
    mean = float(differences.mean())
    half = float(t.ppf((1 + confidence) / 2, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5)
    return PairedInterval(mean, mean - half, mean + half, len(differences))
