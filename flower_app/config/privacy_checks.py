"""What a run's privacy settings cannot mean: found before any work starts."""

from __future__ import annotations

from collections.abc import Collection

from client_pipeline.link.privacy_config import PrivacyConfig
from strategies.traits import Traits


def check_privacy(
    privacy: PrivacyConfig, *, strategy: str, traits: Traits, aggregator: str, update: str, clip_norm: float
) -> None:
    """Refuse settings that would guarantee nothing, or that nothing obeys.

    Parameters
    ----------
    privacy : the settings
    strategy, aggregator : names of the run's
    traits : what the strategy does
    update : how updates are compressed
    clip_norm : of the optimizer; 0 without clipping

    Raises
    ------
    ValueError
        Naming the key, and what to do.
    """
    if privacy.on_activations and not traits.decoder_on_server:
        raise ValueError(
            f"privacy.activation-clip: with strategy = {strategy} no activation leaves its cluster, found "
            f"{privacy.activation_clip:g}; leave it out"
        )
    if privacy.on_updates and not traits.uploads:
        raise ValueError(f"privacy.update-clip: strategy = {strategy} uploads no update; leave it out")
    if privacy.update_mechanism != "local" and not traits.takes_aggregator:
        raise ValueError(
            f"privacy.update-mechanism: {privacy.update_mechanism} needs strategy = collapipe, found "
            f'{strategy!r}; set privacy.update-mechanism = "local"'
        )
    if privacy.secure_aggregation:
        from strategies.aggregation.rules import rule_class

        for key, value, expected, fits in (
            ("strategy", strategy, "collapipe", traits.takes_aggregator),
            ("aggregator.name", aggregator, "mean", rule_class(aggregator).mean_alone),
            ("compression.update", update, "none", update == "none"),
            ("privacy.update-mechanism", privacy.update_mechanism, "local", privacy.update_mechanism == "local"),
        ):
            if not fits:
                raise ValueError(
                    f"privacy.secure-aggregation: the server sees only the mean of whole updates, which needs "
                    f"{key} = {expected}, found {value!r}; change one of them"
                )
    if privacy.update_mechanism.startswith("client") and update != "none":
        raise ValueError(
            f"compression.update: {update} sends no weights, which Flower's mod of "
            f"privacy.update-mechanism = {privacy.update_mechanism} would clip; leave one out"
        )
    if traits.decoder_on_server and clip_norm and (privacy.update_noise or privacy.activation_noise):
        raise ValueError(
            f"optimizer.clip-norm: {clip_norm:g} makes each control unit send how large its gradient "
            "was, which no noise of [privacy] hides; set it to 0"
        )


def check_shared_matrices(
    privacy: PrivacyConfig, *, traits: Traits, local_steps: int, family: str, shared: Collection[str]
) -> None:
    """Refuse noise on a model whose embedding goes to the server between the steps of a round.

    Parameters
    ----------
    privacy : the settings
    traits : what the run's strategy does
    local_steps, family : of the run
    shared : matrices of the embedding that the decoder reads

    Raises
    ------
    ValueError
        Naming the matrix, and what to do.
    """
    noisy = privacy.update_noise or privacy.activation_noise
    if traits.decoder_on_server and noisy and shared and local_steps > 1:
        raise ValueError(
            f"privacy: the decoder of model.family = {family} reads the embedding's "
            f"{', '.join(shared)}, which is sent to it as it is before every step after a round's first; "
            "set local-steps = 1, or use a family that shares no matrix"
        )
