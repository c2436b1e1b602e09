"""Checks of privacy settings that exclude each other, before any work starts."""

from __future__ import annotations

from collections.abc import Collection

from client_pipeline.link.privacy_config import PrivacyConfig
from strategies.traits import Traits


def check_privacy(
    privacy: PrivacyConfig, *, strategy: str, traits: Traits, update: str, clip_norm: float, returns_states: bool
) -> None:
    """Refuse settings that would guarantee nothing, or that nothing obeys."""
    if privacy.on_gradients and not returns_states:
        raise ValueError(
            f"privacy.gradient-clip: no control unit sends gradients of its loss, found {privacy.gradient_clip:g}; set "
            'split.labels = "cluster" with a language model, or leave it out'
        )
    if privacy.on_activations and not traits.decoder_on_server:
        raise ValueError(
            f"privacy.activation-clip: with strategy = {strategy}, and split.labels as it is, no activation leaves its "
            f"cluster, found {privacy.activation_clip:g}; leave it out"
        )
    if privacy.on_updates and not traits.uploads:
        raise ValueError(f"privacy.update-clip: strategy = {strategy} uploads no update; leave it out")
    if privacy.update_mechanism != "local" and not traits.takes_aggregator:
        raise ValueError(
            f"privacy.update-mechanism: {privacy.update_mechanism} needs strategy = collapipe, found "
            f'{strategy!r}; set privacy.update-mechanism = "local"'
        )
    if privacy.update_mechanism.startswith("client") and update != "none":
        raise ValueError(
            f"compression.update: {update} sends no weights, which Flower's mod of "
            f"privacy.update-mechanism = {privacy.update_mechanism} would clip; leave one out"
        )
    noisy = privacy.update_noise or privacy.activation_noise or privacy.gradient_noise
    if traits.decoder_on_server and clip_norm and noisy:
        raise ValueError(
            f"optimizer.clip-norm: {clip_norm:g} makes each control unit send how large its gradient "
            "was, which no noise of [privacy] hides; set it to 0"
        )


def check_shared_matrices(
    privacy: PrivacyConfig, *, traits: Traits, local_steps: int, family: str, shared: Collection[str]
) -> None:
    """Refuse noise with matrices of the embedding that go to the server between the steps of a round."""
    noisy = privacy.update_noise or privacy.activation_noise
    if traits.decoder_on_server and noisy and shared and local_steps > 1:
        raise ValueError(
            f"privacy: the decoder of model.family = {family} reads the embedding's "
            f"{', '.join(shared)}, which is sent to it as it is before every step after a round's first; "
            "set local-steps = 1, or use a family that shares no matrix"
        )
