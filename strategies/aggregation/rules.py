"""How the clusters' encoders are joined: their mean, or one of Flower's rules that bear with some poisoned ones.

The rules are those of ``flwr.serverapp.strategy``; here they see what each cluster changed in the round, not its whole
weights. That moves every vector by the same, which none of them minds, and keeps Krum's squared distances from drowning
in the rounding of squared norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from flwr.serverapp.strategy import Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Strategy

from client_pipeline.link.privacy import PrivacyConfig
from client_pipeline.plugins import class_named
from strategies.aggregation.central_privacy import with_central_noise
from strategies.aggregation.server_optimizers import ServerOptimizerConfig, averaging_strategy
from strategies.aggregation.update_rule import OnUpdates, UpdateRule

AGGREGATORS = ("mean", "krum", "multi-krum", "trimmed-mean", "median", "bulyan")


@dataclass(frozen=True, kw_only=True)
class AggregatorConfig:
    """Table ``[aggregator]``: how the clusters' encoders become one. The decoder is trained, not averaged."""

    name: str = "mean"
    """``mean``, weighted by targets; ``krum`` takes the update that is nearest to most others, ``multi-krum`` the mean
    of some of those; ``median`` and ``trimmed-mean`` go weight by weight; ``bulyan`` is both in turn. All but the mean
    and the Krums count every cluster alike. Or ``module:Class``, a class of
    :class:`~strategies.aggregation.update_rule.UpdateRule`."""
    malicious: int = 1
    """f: clusters of a round that may send anything. Not of ``mean``."""
    keep: int = 0
    """``multi-krum``: updates that are averaged; 0: all but f."""
    trim: float = 0.2
    """``trimmed-mean``: share of the clusters that is left out at each end."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.name not in AGGREGATORS and ":" not in self.name:
            raise ValueError(
                f"aggregator.name: expected one of {', '.join(AGGREGATORS)}, or module:Class, found {self.name!r}"
            )
        for name, least in (("malicious", 1), ("keep", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"aggregator.{name}: expected at least {least}, found {getattr(self, name)}")
        if not 0 < self.trim < 0.5:
            raise ValueError(f"aggregator.trim: expected a number between 0 and 0.5, found {self.trim}")

    @property
    def fewest(self) -> int:
        """Clusters that a round needs."""
        return self.fewest_of(self.malicious)

    def fewest_of(self, f: int) -> int:
        """Clusters that must answer where ``f`` of them may have sent anything."""
        return rule_class(self.name).fewest(self, f)

    def borne(self, num_answers: int, num_failed: int) -> int | None:
        """How many of the answers are taken for malicious; None if there are too few.

        All f, as long as there are enough answers. Of fewer, f less the clusters of the round that failed: whoever does
        not answer, or not as ordered, has done its worst in this round.
        """
        for f in (self.malicious, self.malicious - num_failed):
            if f >= 0 and num_answers >= self.fewest_of(f):
                return f
        return None

    def check(self, num_clusters: int) -> None:
        """Refuse a rule that rounds of so many clusters are too few for.

        Raises
        ------
        ValueError
            Saying how many it needs.
        """
        if num_clusters < self.fewest:
            also = {"multi-krum": f" and keep = {self.keep}", "trimmed-mean": f" and trim = {self.trim}"}
            raise ValueError(
                f"aggregator.name: {self.name} with aggregator.malicious = {self.malicious}{also.get(self.name, '')} "
                f"needs {self.fewest} clusters in a round, found {num_clusters}; use more clusters and channels, lower "
                "aggregator.malicious, or take another rule"
            )


class _Mean(OnUpdates):
    """Stands for the weighted mean, which :func:`averaging_strategy` computes."""

    mean_alone = True
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
    """Return the class of a rule, which says what it needs.

    Raises
    ------
    ValueError
        For ``module:Class`` that cannot be imported, or is no rule.
    """
    if name in _RULES:
        return _RULES[name]
    return cast(type[OnUpdates], class_named("aggregator.name", name, UpdateRule))


def build_aggregator(
    config: AggregatorConfig,
    optimizer: ServerOptimizerConfig,
    privacy: PrivacyConfig = PrivacyConfig(),  # noqa: B008 (it is frozen)
    *,
    num_clusters: int,
) -> Strategy:
    """Build the strategy whose ``aggregate_train`` joins the encoders of ``num_clusters`` in a round.

    Raises
    ------
    ValueError
        For two of a robust rule, a server optimizer and noise on the server: Flower has no such strategy. For too few
        clusters.
    """
    config.check(num_clusters)
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
