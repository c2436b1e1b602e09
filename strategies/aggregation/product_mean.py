"""The mean of adapters by their products, as one of Flower's strategies: ``lora.average = "products"``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from client_pipeline.partition.spec import LoraConfig
from strategies.aggregation.adapter_products import Factors, leading_factors, mean_product
from strategies.flower_names import log
from strategies.records import WEIGHT_KEY, read_metric, sole_arrays, to_numpy

_A, _B = ".lora_A.", ".lora_B."

_Arrays = Mapping[str, NDArray[Any]]


class ProductMean(FedAvg):
    """FedAvg that joins adapters by :func:`~strategies.aggregation.adapter_products.mean_product`.

    Parameters
    ----------
    lora : with the ranks of the clusters
    """

    def __init__(self, lora: LoraConfig) -> None:
        super().__init__(weighted_by_key=WEIGHT_KEY)
        self.lora = lora
        self.current_arrays = ArrayRecord()
        """Arrays at the start of the round, of the global rank."""
        self.truncated = 0.0
        """Largest share that a layer's mean of products lost in the last round by the cut to the global rank."""

    def arrays_of_cluster(self, cluster: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return a cluster's arrays at the start; a lower rank gets the best adapters of that rank."""
        rank = self.lora.of_cluster(cluster).rank
        if rank == self.lora.rank:
            return arrays
        joined = to_numpy(arrays)
        for name_b, name_a in _pairs(joined):
            _put(joined, name_b, name_a, self.cut(Factors.of(joined[name_b], joined[name_a]), rank))
        return _record(joined)

    def cut(self, factors: Factors, rank: int) -> Factors:
        """Return the factors that a cluster of a lower rank begins with."""
        return leading_factors(factors, rank)

    def mean(self, start: Factors, trained: Sequence[tuple[float, Factors]]) -> tuple[Factors, float]:
        """Join the clusters' factors of a layer.

        Parameters
        ----------
        start : the round's, of the global rank
        trained : of each cluster its weight, which add up to 1, and its factors

        Returns
        -------
        Factors of the global rank, and the share of the mean's norm that they lack.
        """
        return mean_product(start, trained, [leading_factors(start, each.rank) for _, each in trained])

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join the adapters by their products; without a good reply nothing changes."""
        good, _ = self._check_and_log_replies(list(replies), is_train=True)
        if not good:
            return None, None
        weights = np.array([read_metric(reply, WEIGHT_KEY) for reply in good])
        weights = weights / weights.sum()
        start, updates = to_numpy(self.current_arrays), [to_numpy(sole_arrays(reply)) for reply in good]
        pairs = list(_pairs(start))
        factors = {name for pair in pairs for name in pair}
        joined: dict[str, NDArray[Any]] = {}
        for name, value in start.items():
            # The adapters keep their places, as in FedAvg.
            others = () if name in factors else zip(weights, updates, strict=True)
            mean = sum((weight * update[name] for weight, update in others), np.zeros_like(value, dtype=np.float64))
            joined[name] = mean.astype(value.dtype)
        shares = []
        for name_b, name_a in pairs:
            trained = [Factors.of(update[name_b], update[name_a]) for update in updates]
            first = Factors.of(start[name_b], start[name_a])
            mean_factors, truncated = self.mean(first, list(zip(weights, trained, strict=True)))
            _put(joined, name_b, name_a, mean_factors)
            shares.append(truncated)
        self.truncated = max(shares, default=0.0)
        log(
            INFO,
            "aggregate_train: round %d: adapters of rank %d have all but %.2g of the norm of the mean of products",
            server_round,
            self.lora.rank,
            self.truncated,
        )
        metrics = self.train_metrics_aggr_fn([reply.content for reply in good], self.weighted_by_key)
        return _record(joined), metrics


def arrays_of_cluster(aggregator: Strategy, cluster: int, arrays: ArrayRecord) -> ArrayRecord:
    """Return a cluster's arrays at the start of the round; they differ only in the rank of adapters."""
    return aggregator.arrays_of_cluster(cluster, arrays) if isinstance(aggregator, ProductMean) else arrays


def _pairs(arrays: _Arrays) -> Iterator[tuple[str, str]]:
    """Names of B and A of each adapter."""
    return ((name, name.replace(_B, _A)) for name in arrays if _B in name)


def _put(arrays: dict[str, NDArray[Any]], name_b: str, name_a: str, factors: Factors) -> None:
    arrays[name_b] = factors.b.astype(arrays[name_b].dtype)
    arrays[name_a] = factors.a.astype(arrays[name_a].dtype)


def _record(arrays: _Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def check_lora_average(
    lora: LoraConfig, *, trainable: str, strategy: str, takes_aggregator: bool, num_clusters: int
) -> None:
    """Refuse a mean of products, and ranks of clusters, where nothing uses them.

    Parameters
    ----------
    lora : the table ``[lora]``
    trainable : ``model.trainable``
    strategy : its name
    takes_aggregator : whether ``[aggregator]`` applies to the strategy
    num_clusters : N

    Raises
    ------
    ValueError
        With the key and the remedy.
    """
    if lora.average == "factors":
        return
    key, value = ("cluster-ranks", lora.cluster_ranks) if lora.ranks else ("average", lora.average)
    if trainable != "lora":
        raise ValueError(
            f"lora.{key}: {value} is of adapters, found model.trainable = {trainable!r}; set model.trainable = "
            f'"lora", or leave lora.{key} out'
        )
    if not takes_aggregator:
        raise ValueError(
            f"lora.{key}: strategy = {strategy} averages arrays of one shape, number by number, found {value}; leave "
            f'lora.{key} out, or set strategy = "collapipe"'
        )
    if lora.ranks and len(lora.ranks) != num_clusters:
        raise ValueError(
            f"lora.cluster-ranks: expected a rank for each of the {num_clusters} clusters, found {len(lora.ranks)}: "
            f"{lora.cluster_ranks!r}"
        )
