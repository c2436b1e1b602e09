"""Which cluster gets which channel: the assignment problem of Algorithm 2, exact."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from client_pipeline.system.radio import Array


class Matching(NamedTuple):
    """Clusters with their channels."""

    channel_of: tuple[int | None, ...]
    """(N,), the channel of each cluster; None for a cluster on a virtual channel."""
    cost: float
    """Costs of the pairs, and ``skip`` of the clusters without a channel."""


def match_channels(costs: Array, skip: Array) -> Matching | None:
    """Cheapest matching of exactly min(N, J) clusters, by the Hungarian method.

    When N > J the paper adds N - J virtual channels, and a cluster on one of them pays ``skip``. The rectangular
    problem with costs less ``skip`` has the same matchings and the same order among them, in a smaller table.

    Parameters
    ----------
    costs : (N, J), cost of each pair; inf where it is impossible
    skip : (N,), cost of each cluster without a channel, of any sign; of no effect when N <= J

    Returns
    -------
    None when fewer than min(N, J) clusters can be matched.
    """
    num_clusters, num_channels = costs.shape
    saved = costs - skip[:, None] if num_clusters > num_channels else costs
    try:
        rows, columns = linear_sum_assignment(saved)
    except ValueError:  # no matching avoids the infinite costs
        return None
    channel_of: list[int | None] = [None] * num_clusters
    for n, j in zip(rows.tolist(), columns.tolist(), strict=True):
        channel_of[n] = j
    unmatched = np.ones(num_clusters, dtype=bool)
    unmatched[rows] = False
    return Matching(tuple(channel_of), float(costs[rows, columns].sum() + skip[unmatched].sum()))
