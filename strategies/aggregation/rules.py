"""How the clusters' encoders are joined: their mean, or one of Flower's rules that bear with some poisoned ones.

The rules are those of ``flwr.serverapp.strategy``; here they see what each cluster changed in the round, not its whole
weights. That moves every vector by the same, which none of them minds, and keeps Krum's squared distances from drowning
in the rounding of squared norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Strategy

from client_pipeline.link.privacy import PrivacyConfig
from strategies.aggregation.central_privacy import with_central_noise
from strategies.aggregation.server_optimizers import ServerOptimizerConfig, averaging_strategy
from strategies.flower_internals import log
from strategies.records import WEIGHT_KEY, sole_arrays

AGGREGATORS = ("mean", "krum", "multi-krum", "trimmed-mean", "median", "bulyan")


@dataclass(frozen=True, kw_only=True)
class AggregatorConfig:
    """Table ``[aggregator]``: how the clusters' encoders become one. The decoder is trained, not averaged."""

    name: str = "mean"
    """``mean``, weighted by targets; ``krum`` takes the update that is nearest to most others, ``multi-krum`` the mean
    of some of those; ``median`` and ``trimmed-mean`` go weight by weight; ``bulyan`` is both in turn. All but the mean
    and the Krums count every cluster alike."""
    malicious: int = 1
    """f: clusters of a round that may send anything. Not of ``mean``."""
    keep: int = 0
    """``multi-krum``: updates that are averaged; 0: all but f."""
    trim: float = 0.2
    """``trimmed-mean``: share of the clusters that is left out at each end."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.name not in AGGREGATORS:
            raise ValueError(f"aggregator.name: expected one of {', '.join(AGGREGATORS)}, found {self.name!r}")
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
        if self.name in ("krum", "multi-krum"):
            return max(2 * f + 3, self.keep + f if self.name == "multi-krum" else 0)
        if self.name == "trimmed-mean":
            # As many are cut at each end as Flower does: the whole part.
            return next(n for n in range(2 * f + 1, 10_000_000) if int(self.trim * n) >= f)
        return {"mean": 1, "median": 2 * f + 1, "bulyan": 4 * f + 3}[self.name]

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


class _OnUpdates(FedAvg):
    """Hands one of Flower's strategies, the next in line, the changes of a round in place of its weights."""

    def __init__(self, config: AggregatorConfig, num_clusters: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.config = config
        self.num_clusters = num_clusters
        """Of a round."""
        self.current_arrays = ArrayRecord()
        """What the round began with."""

    def size(self, num_updates: int, malicious: int) -> None:
        """Get ready for so many updates, and so many poisoned ones among them."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; without enough replies nothing changes."""
        good_replies = [reply for reply in replies if not reply.has_error()]
        malicious = (
            self.config.borne(len(good_replies), self.num_clusters - len(good_replies)) if good_replies else None
        )
        if malicious is None:
            log(
                WARNING,
                "aggregate_train: round %d: %s needs %d clusters, %d answered; the encoder is unchanged",
                server_round,
                self.config.name,
                self.config.fewest,
                len(good_replies),
            )
            return None, None
        self.size(len(good_replies), malicious)
        start = {name: array.numpy() for name, array in self.current_arrays.items()}
        for reply in good_replies:
            (key,) = reply.content.array_records
            arrays = sole_arrays(reply)
            reply.content[key] = ArrayRecord(
                # Of arrays without dimensions numpy makes scalars.
                {n: Array(np.asarray(arrays[n].numpy() - start[n])) for n in start}
            )
        change, metrics = super().aggregate_train(server_round, good_replies)
        if change is None:
            return None, metrics
        joined = {n: np.asarray(start[n] + change[n].numpy().astype(start[n].dtype)) for n in start}
        return ArrayRecord({n: Array(value) for n, value in joined.items()}), metrics


class _Krum(_OnUpdates, Krum):
    num_nodes_to_select: int
    num_malicious_nodes: int

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_nodes_to_select, self.num_malicious_nodes = 1, malicious


class _MultiKrum(_OnUpdates, MultiKrum):
    num_nodes_to_select: int
    num_malicious_nodes: int

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_nodes_to_select, self.num_malicious_nodes = self.config.keep or num_updates - malicious, malicious


class _TrimmedMean(_OnUpdates, FedTrimmedAvg):
    pass


class _Median(_OnUpdates, FedMedian):
    pass


class _Bulyan(_OnUpdates, Bulyan):
    num_malicious_nodes: int

    def size(self, num_updates: int, malicious: int) -> None:
        self.num_malicious_nodes = malicious


_RULES: dict[str, type[_OnUpdates]] = {
    "krum": _Krum,
    "multi-krum": _MultiKrum,
    "trimmed-mean": _TrimmedMean,
    "median": _Median,
    "bulyan": _Bulyan,
}


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
    arguments: dict[str, Any] = {"weighted_by_key": WEIGHT_KEY}
    if config.name in ("krum", "multi-krum", "bulyan"):
        arguments["num_malicious_nodes"] = config.malicious
    elif config.name == "trimmed-mean":
        arguments["beta"] = config.trim
    return _RULES[config.name](config, num_clusters, **arguments)
