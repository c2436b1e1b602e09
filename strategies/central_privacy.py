"""Noise that the server adds to the average, by Flower's own strategies: it protects from all but the server.

Each of Flower's wrappers stands inside ``CollaPipe(aggregator=...)``. Around the whole strategy those that clip on the
server fail, as replies have no decoder, and the others noise the decoder, which no cluster has sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from client_pipeline.link.privacy import PrivacyConfig

_EQUAL_WEIGHT = "steps"
"""A metric that is the same for every cluster of a run: the mean's sensitivity is the clip over their number."""


class _OfThoseWhoAnswered(Strategy):
    """Has the noise fit the number of clusters whose updates are in the average."""

    num_sampled_clients: int

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; Flower would throw the whole round away for one error."""
        good = [reply for reply in replies if not reply.has_error()]
        if not good:
            return None, None
        self.num_sampled_clients = len(good)
        # The next in line is Flower's own.
        return super().aggregate_train(server_round, good)  # type: ignore[safe-super]


class _ServerFixed(_OfThoseWhoAnswered, DifferentialPrivacyServerSideFixedClipping):
    pass


class _ServerAdaptive(_OfThoseWhoAnswered, DifferentialPrivacyServerSideAdaptiveClipping):
    pass


class _ClientFixed(_OfThoseWhoAnswered, DifferentialPrivacyClientSideFixedClipping):
    pass


class _ClientAdaptive(_OfThoseWhoAnswered, DifferentialPrivacyClientSideAdaptiveClipping):
    pass


def with_central_noise(config: PrivacyConfig, num_clusters: int) -> Strategy:
    """Build the strategy that averages updates, each counted alike, and noises the mean.

    Parameters
    ----------
    config : an ``update-mechanism`` other than ``local``
    num_clusters : of a round

    Raises
    ------
    ValueError
        If so few clusters cannot adapt the clip in secret.
    """
    average = FedAvg(weighted_by_key=_EQUAL_WEIGHT)
    if config.update_mechanism == "server-fixed":
        return _ServerFixed(average, config.update_noise, config.update_clip, num_clusters)
    if config.update_mechanism == "client-fixed":
        return _ClientFixed(average, config.update_noise, config.update_clip, num_clusters)
    kind = _ServerAdaptive if config.update_mechanism == "server-adaptive" else _ClientAdaptive
    if config.update_noise >= num_clusters / 10:
        # Flower's own message names none of our keys.
        raise ValueError(
            f"privacy.update-noise: {config.update_noise:g} with {config.update_mechanism} clipping needs more than "
            f"{10 * config.update_noise:g} clusters in a round, found {num_clusters}: how many were clipped is noised, "
            "too; use more clusters, less noise, or a fixed clip"
        )
    return kind(average, config.update_noise, num_clusters, initial_clipping_norm=config.update_clip)


def tell_clip(aggregator: Strategy, config: ConfigRecord) -> None:
    """Put what Flower's client-side mods ask for into a round's configuration."""
    if isinstance(aggregator, _ClientFixed | _ClientAdaptive):
        config[KEY_CLIPPING_NORM] = float(aggregator.clipping_norm)


def adaptive_clip(aggregator: Strategy) -> float | None:
    """The clip that adapts from round to round, for a checkpoint; None where it does not."""
    return float(aggregator.clipping_norm) if isinstance(aggregator, _ServerAdaptive | _ClientAdaptive) else None


def restore_clip(aggregator: Strategy, clip: Any) -> None:
    """Go on with the clip of a checkpoint."""
    if isinstance(aggregator, _ServerAdaptive | _ClientAdaptive) and clip is not None:
        aggregator.clipping_norm = float(clip)
