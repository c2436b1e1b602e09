"""Noise that the server adds to the average, by Flower's own strategies: it protects from all but the server.

They clip and count. The noise is drawn here, from a cryptographic generator, because Flower's functions use numpy's
global one. A cluster's weight is set here, whatever it claims.

Each of Flower's wrappers stands inside ``CollaPipe(aggregator=...)``. Around the whole strategy those that clip on the
server fail, as replies have no decoder, and the others noise the decoder, which no cluster has sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

from client_pipeline.link.privacy import NoiseSource
from client_pipeline.link.privacy_config import PrivacyConfig
from strategies.flower_names import KEY_CLIPPING_NORM, KEY_NORM_BIT
from strategies.npy_bytes import array_values

_EQUAL_WEIGHT = "equal-weight"
"""A metric that the server sets to one in every reply: the mean's sensitivity is the clip over their number."""
_DRAWN = {
    DifferentialPrivacyServerSideFixedClipping: ("_add_noise_to_aggregated_arrays",),
    DifferentialPrivacyClientSideFixedClipping: ("_add_noise_to_aggregated_arrays",),
    DifferentialPrivacyServerSideAdaptiveClipping: ("_add_noise_to_aggregated_arrays", "_noisy_fraction"),
    DifferentialPrivacyClientSideAdaptiveClipping: ("_add_noise_to_aggregated_arrays", "_noisy_fraction"),
}
"""Methods of Flower's wrappers that draw noise, overridden below."""


class _OfThoseWhoAnswered(Strategy):
    """Mixin that fits the noise to the number of clusters in the average, each with the same weight."""

    num_sampled_clients: int
    noise_multiplier: float
    clipping_norm: float
    clipped_count_stddev: float
    noise = NoiseSource()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the good replies; Flower would discard the whole round for one error."""
        good_replies = [reply for reply in replies if not reply.has_error()]
        if not good_replies:
            return None, None
        self.num_sampled_clients = len(good_replies)
        for reply in good_replies:
            for record in reply.content.metric_records.values():
                record[_EQUAL_WEIGHT] = 1.0
        # An update without changes has norm zero: numpy's quotient is infinite then, and clips nothing.
        self.clipping_norm = np.float64(self.clipping_norm)
        with np.errstate(divide="ignore"):
            # The next in line is Flower's own.
            return super().aggregate_train(server_round, good_replies)  # type: ignore[safe-super]

    def _add_noise_to_aggregated_arrays(self, aggregated_arrays: ArrayRecord) -> ArrayRecord:
        """Add noise of standard deviation z C / n, in float64, and round the sum."""
        std = self.noise_multiplier * float(self.clipping_norm) / self.num_sampled_clients
        if not std:
            return aggregated_arrays
        noised = {}
        for name, array in aggregated_arrays.items():
            mean = array_values(array)
            noised[name] = Array(np.asarray(mean + std * self.noise.normal(mean.shape), dtype=mean.dtype))
        return ArrayRecord(noised)

    def _noisy_fraction(self, count: int, total: int) -> float:
        """Return the share of the clusters whose update was clipped, with noise."""
        return (count + self.clipped_count_stddev * float(self.noise.normal(()))) / total


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
        If there are too few clusters to adapt the clip in secret.
    RuntimeError
        If this version of Flower draws its noise elsewhere than in the methods that are overridden here.
    """
    for base, names in _DRAWN.items():
        for name in names:
            if not hasattr(base, name):
                raise RuntimeError(
                    f"privacy.update-mechanism: expected {name} of Flower's {base.__name__}, where noise is drawn; "
                    'install a flwr that pyproject.toml names, or set privacy.update-mechanism = "local"'
                )
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
            f"{10 * config.update_noise:g} clusters in a round, found {num_clusters}: the number of clipped updates "
            "is noised, too; use more clusters, less noise, or a fixed clip"
        )
    return kind(average, config.update_noise, num_clusters, initial_clipping_norm=config.update_clip)


def tell_clip(aggregator: Strategy, config: ConfigRecord) -> None:
    """Put the settings of Flower's client-side mods into a round's configuration."""
    if isinstance(aggregator, _ClientFixed | _ClientAdaptive):
        config[KEY_CLIPPING_NORM] = float(aggregator.clipping_norm)
    if isinstance(aggregator, _ClientAdaptive):
        # The mod does so anyway; replies are checked against their orders.
        config[KEY_NORM_BIT] = True


def adaptive_clip(aggregator: Strategy) -> float | None:
    """Return the clip that adapts from round to round, for a checkpoint; None where it does not."""
    return float(aggregator.clipping_norm) if isinstance(aggregator, _ServerAdaptive | _ClientAdaptive) else None


def restore_clip(aggregator: Strategy, clip: Any) -> None:
    """Go on with the clip of a checkpoint."""
    if isinstance(aggregator, _ServerAdaptive | _ClientAdaptive) and clip is not None:
        aggregator.clipping_norm = float(clip)
