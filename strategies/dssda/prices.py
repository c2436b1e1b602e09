"""Prices of channels: a bound below every matching, and the cheapest matching of a large round found with their help.

Write the matching as a table of w = cost - skip (N > J, a channel a row) or w = cost (N <= J, a cluster a row), in
which every row takes one column and no column is taken twice. Any prices u of the rows bound the cost of a matching:

    cost >= sum of u + sum over columns of min(0, least w - u),     without the 0 where rows and columns are as many.

The best prices attain it. They tell which pairs matter, so that a sparse matching finds the optimum: it is searched
among the pairs that look cheapest under the prices of a similar round and priced anew, and any pair that would undercut
its prices joins. Where none does, no other matching costs less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from client_pipeline.system.radio import Array
from strategies.dssda.matching import Matching, match_channels

FEW_PAIRS = 2**12
"""Up to so many pairs prices save no time."""
_DROWNED = 1e4
"""A ``skip`` this much larger than all costs leaves them twelve digits."""
_CHEAPEST = 4
"""Pairs of each row that are tried first."""
_PRECISION = 1e-12
"""Relative to the largest w: a pair that undercuts the prices by less is a matter of rounding."""
Index = NDArray[np.intp]


class PricedMatching(NamedTuple):
    """The cheapest matching, and its proof."""

    matching: Matching
    bound: float
    """No matching costs less."""
    prices: Array | None
    """u of each row; None in a small round."""


def price_bound(costs: Array, skip: Array, prices: Array) -> float:
    """Cost that no matching undercuts.

    Parameters
    ----------
    costs : (N, J), cost of each pair; inf where it is impossible
    skip : (N,), cost of each cluster without a channel
    prices : (min(N, J),), any prices of the channels, or of the clusters where there are no more of them than channels

    Returns
    -------
    -inf where ``skip`` is too large for a bound.
    """
    table = _rows_that_take_a_column(costs, skip)
    if table is None:
        return -np.inf
    paid = np.min(table - prices[:, None], axis=0)
    if table.shape[0] < table.shape[1]:
        paid = np.minimum(paid, 0.0)
    num_clusters, num_channels = costs.shape
    paid_anyway = float(skip.sum() - num_channels * np.median(skip)) if num_clusters > num_channels else 0.0
    return float(prices.sum() + paid.sum() + paid_anyway)


def match_at_prices(costs: Array, skip: Array, prices: Array | None) -> PricedMatching | None:
    """Cheapest matching of exactly min(N, J) clusters; see :func:`strategies.dssda.matching.match_channels`.

    Parameters
    ----------
    costs, skip : as for :func:`price_bound`
    prices : of a similar round, if there is one: the closer it is, the sooner the matching is found

    Returns
    -------
    None when fewer than min(N, J) clusters can be matched.
    """
    table = _rows_that_take_a_column(costs, skip) if costs.size > FEW_PAIRS else None
    if table is None:
        plain = match_channels(costs, skip)
        return None if plain is None else PricedMatching(plain, plain.cost, None)
    optimum = None if prices is None else _sparse_matching(table, prices)
    if optimum is None:
        try:
            _, column = linear_sum_assignment(table)
        except ValueError:  # no matching avoids the infinite costs
            return None
        optimum = column, _row_prices(table, column)
    column, prices = optimum
    taken = column
    if len(costs) > costs.shape[1]:
        # Clusters are the columns: the channel of each, -1 for one without.
        taken = np.full(len(costs), -1, dtype=np.intp)
        taken[column] = np.arange(len(column))
    paid, matched = skip.copy(), np.flatnonzero(taken >= 0)
    paid[matched] = costs[matched, taken[matched]]
    matching = Matching(tuple(None if j < 0 else j for j in taken.tolist()), float(paid.sum()))
    return PricedMatching(matching, price_bound(costs, skip, prices), prices)


def _rows_that_take_a_column(costs: Array, skip: Array) -> Array | None:
    """The table of w, with no more rows than columns; None where ``skip`` would drown the costs in rounding."""
    if len(costs) <= costs.shape[1]:
        return costs
    # Exactly N - J clusters pay their skip: a part that all have alike is paid anyway.
    savings = skip - np.median(skip)
    if np.max(np.abs(savings)) > _DROWNED * _largest(costs):
        return None
    return np.ascontiguousarray((costs - savings[:, None]).T)


def _largest(table: Array) -> float:
    return float(np.max(np.abs(table), where=np.isfinite(table), initial=0.0))


def _sparse_matching(table: Array, prices: Array) -> tuple[Index, Array] | None:
    """Column of each row in the cheapest matching, and its prices; None if the few pairs tried first allow none."""
    num_rows, num_columns = table.shape
    precision = _PRECISION * _largest(table)
    rows = np.arange(num_rows)
    dear = table - prices[:, None]
    dear -= np.minimum(dear.min(axis=0), 0.0)
    few = np.argpartition(dear, min(_CHEAPEST, num_columns - 1), axis=1)[:, :_CHEAPEST]
    kept = np.zeros(table.shape, dtype=bool)
    kept[rows[:, None], few] = True
    kept[np.argmin(dear, axis=0), np.arange(num_columns)] = True
    kept &= np.isfinite(table)
    while True:
        row, column = np.nonzero(kept)
        weights = table[row, column] - prices[row]
        # The solver takes a weight of 0 for no pair.
        sparse = csr_array((weights - weights.min(initial=0.0) + 1.0, (row, column)), shape=table.shape)
        try:
            _, taken = min_weight_full_bipartite_matching(sparse)
        except ValueError:
            return None
        taken = taken.astype(np.intp)
        tried = np.where(kept, table, np.inf)
        fresh = _row_prices(tried, taken)
        pays = np.zeros(num_columns)
        pays[taken] = table[rows, taken] - fresh
        undercut = (table - fresh[:, None] - pays < -precision) & ~kept
        if not np.any(undercut):
            return taken, fresh
        kept |= undercut


def _row_prices(table: Array, column: Index) -> Array:
    """Prices at which the cheapest matching attains the bound, by shortest paths (Bellman and Ford).

    Another row must not want a row's column more than that row does, and no row an idle column at price 0.

    Parameters
    ----------
    column : (rows,), of each row in the cheapest matching
    """
    num_rows, num_columns = table.shape
    rows, largest = np.arange(num_rows), _largest(table)
    envy = table[:, column] - table[rows, column]
    idle = np.ones(num_columns, dtype=bool)
    idle[column] = False
    # No shortest path is longer than this; a row that wants nobody's column keeps it.
    prices = np.full(num_rows, (2 * num_rows + 1) * largest)
    if np.any(idle):
        prices = np.minimum(prices, np.min(table[:, idle], axis=1))
    for _ in range(num_rows):
        shorter = np.minimum(prices, np.min(envy + prices, axis=1))
        if not np.any(shorter < prices - _PRECISION * largest):
            break
        prices = shorter
    return prices
