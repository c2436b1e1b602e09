"""Rules that join the clusters' encoders: the mean, or one of Flower's that tolerate some poisoned updates.

The rules are those of ``flwr.serverapp.strategy``. They receive each cluster's change in the round, not its whole
weights. That shifts every vector by the same amount, which changes no rule's result. It also keeps Krum's squared
distances above the rounding errors of squared norms.
"""

from __future__ import annotations

from typing import Any, cast

from flwr.serverapp.strategy import Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Strategy

from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.plugins import class_named
from strategies.aggregation.central_privacy import with_central_noise
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.product_mean import ProductMean
from strategies.aggregation.server_optimizers import averaging_strategy
from strategies.aggregation.update_rule import OnUpdates, UpdateRule


class _Mean(OnUpdates):
    """Placeholder for the weighted mean, which :func:`averaging_strategy` computes."""

    keeps = "nothing"


class _Krum(OnUpdates, Krum):
    keeps = "nothing"
    num_nodes_to_select: int
    num_malicious_nodes: int

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        return 2 * malicious + 3

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_nodes_to_select, self.num_malicious_nodes = 1, malicious


class _MultiKrum(OnUpdates, MultiKrum):
    keeps = "nothing"
    num_nodes_to_select: int
    num_malicious_nodes: int

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        return max(2 * malicious + 3, config.keep + malicious)

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_nodes_to_select, self.num_malicious_nodes = self.config.keep or num_updates - malicious, malicious


class _TrimmedMean(OnUpdates, FedTrimmedAvg):
    keeps = "nothing"

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        # As many are cut at each end as Flower does: the whole part.
        return next(n for n in range(2 * malicious + 1, 10_000_000) if int(config.trim * n) >= malicious)


class _Median(OnUpdates, FedMedian):
    keeps = "nothing"

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        return 2 * malicious + 1


class _Bulyan(OnUpdates, Bulyan):
    keeps = "nothing"
    num_malicious_nodes: int

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        return 4 * malicious + 3

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_malicious_nodes = malicious


_RULES: dict[str, type[OnUpdates]] = {
    "mean": _Mean,
    "krum": _Krum,
    "multi-krum": _MultiKrum,
    "trimmed-mean": _TrimmedMean,
    "median": _Median,
    "bulyan": _Bulyan,
}


def rule_class(name: str) -> type[OnUpdates]:
    """Return the class of a rule, which declares its needs.

    Raises
    ------
    ValueError
        For ``module:Class`` that cannot be imported, or is no rule.
    """
    if name in _RULES:
        return _RULES[name]
    return cast(type[OnUpdates], class_named("aggregator.name", name, UpdateRule))


def fewest_clusters(config: AggregatorConfig) -> int:
    """Return the number of clusters that a round needs."""
    return rule_class(config.name).fewest(config, config.malicious)


def check_clusters_of_rule(config: AggregatorConfig, num_clusters: int) -> None:
    """Refuse a rule that rounds of so many clusters are too few for.

    Raises
    ------
    ValueError
        Saying how many it needs.
    """
    if num_clusters < (fewest := fewest_clusters(config)):
        also = {"multi-krum": f" and keep = {config.keep}", "trimmed-mean": f" and trim = {config.trim}"}
        raise ValueError(
            f"aggregator.name: {config.name} with aggregator.malicious = {config.malicious}{also.get(config.name, '')} "
            f"needs {fewest} clusters in a round, found {num_clusters}; use more clusters and channels, lower "
            "aggregator.malicious, or take another rule"
        )


def build_aggregator(
    config: AggregatorConfig,
    optimizer: ServerOptimizerConfig,
    privacy: PrivacyConfig = PrivacyConfig(),  # noqa: B008 (it is frozen)
    *,
    num_clusters: int,
    adapters: LoraConfig | None = None,
) -> Strategy:
    """Build the strategy whose ``aggregate_train`` joins the encoders of ``num_clusters`` in a round.

    ``adapters`` configures the trained adapters, if any.

    Raises
    ------
    ValueError
        For two of a robust rule, a server optimizer, noise on the server and the mean of adapters' products: Flower has
        no such strategy. For too few clusters.
    """
    if adapters is not None and adapters.average == "products":
        _check_plain_mean(config, optimizer, privacy)
        return ProductMean(adapters)
    check_clusters_of_rule(config, num_clusters)
    if privacy.update_mechanism != "local":
        for key, name, none in (("aggregator", config.name, "mean"), ("server-optimizer", optimizer.name, "none")):
            if name != none:
                raise ValueError(
                    f"{key}.name: {name} and privacy.update-mechanism = {privacy.update_mechanism} cannot both join "
                    'the encoders; leave one out, or set privacy.update-mechanism = "local"'
                )
        return with_central_noise(privacy, num_clusters)
    if config.name == "mean":
        return averaging_strategy(optimizer)
    if optimizer.name != "none":
        raise ValueError(
            f"aggregator.name: {config.name} and server-optimizer.name = {optimizer.name} cannot both join the "
            "encoders; leave one out"
        )
    arguments: dict[str, Any] = {}
    if config.name in ("krum", "multi-krum", "bulyan"):
        arguments["num_malicious_nodes"] = config.malicious
    elif config.name == "trimmed-mean":
        arguments["beta"] = config.trim
    return rule_class(config.name)(config, num_clusters, **arguments)


def _check_plain_mean(config: AggregatorConfig, optimizer: ServerOptimizerConfig, privacy: PrivacyConfig) -> None:
    """Refuse settings that would join factors weight by weight."""
    for key, value, plain in (
        ("aggregator.name", config.name, "mean"),
        ("server-optimizer.name", optimizer.name, "none"),
        ("privacy.update-mechanism", privacy.update_mechanism, "local"),
    ):
        if value != plain:
            raise ValueError(
                f"lora.average: products takes each cluster's factors and no other rule, found {key} = {value}; set "
                f'{key} to {plain}, or lora.average = "factors"'
            )
