"""Channels of the clusters: the assignment problem of Algorithm 2, exact."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from client_pipeline.system.radio import Array


class Matching(NamedTuple):
    """Clusters with their channels."""

    channel_of: tuple[int | None, ...]
    """(N,), the channel of each cluster; None for a cluster on a virtual channel."""
    cost: float
    """Costs of the pairs, and ``skip`` of the clusters without a channel."""


def match_channels(costs: Array, skip: Array) -> Matching | None:
    """Cheapest matching of exactly min(N, J) clusters, by the Hungarian method.

    When N > J there are N - J virtual channels more, on which a cluster pays ``skip``. (Costs less ``skip`` would do
    without them, but a large ``skip`` would then drown the costs in rounding.)

    Parameters
    ----------
    costs : (N, J), cost of each pair; inf where it is impossible
    skip : (N,), cost of each cluster without a channel, of any sign; of no effect when N <= J

    Returns
    -------
    None when fewer than min(N, J) clusters can be matched.
    """
    num_clusters, num_channels = costs.shape
    num_virtual = max(num_clusters - num_channels, 0)
    padded = np.hstack([costs, np.repeat(skip[:, None], num_virtual, axis=1)])
    try:
        rows, columns = linear_sum_assignment(padded)
    except ValueError:  # no matching avoids the infinite costs
        return None
    channel_of = tuple(j if j < num_channels else None for j in columns.tolist())
    return Matching(channel_of, float(padded[rows, columns].sum()))


def most_matched(possible: NDArray[np.bool_]) -> int:
    """The most clusters that can have a channel each at once.

    Parameters
    ----------
    possible : (N, J), which pairs are possible
    """
    return int(np.sum(maximum_bipartite_matching(csr_array(possible), perm_type="column") >= 0))
