"""What a run's privacy settings cannot mean: found before any work starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client_pipeline.partition.parts import ModelParts
    from flower_app.config import RunConfig


def check_privacy(config: RunConfig) -> None:
    """Refuse settings that would guarantee nothing, or that nothing obeys.

    Raises
    ------
    ValueError
        Naming the key, and what to do.
    """
    privacy, collapipe = config.privacy, config.strategy == "collapipe"
    if privacy.on_activations and not collapipe:
        raise ValueError(
            f"privacy.activation-clip: with strategy = {config.strategy} no activation leaves its cluster, found "
            f"{privacy.activation_clip:g}; leave it out"
        )
    if privacy.on_updates and config.strategy == "pipeline":
        raise ValueError("privacy.update-clip: strategy = pipeline uploads no update; leave it out")
    if privacy.update_mechanism != "local" and not collapipe:
        raise ValueError(
            f"privacy.update-mechanism: {privacy.update_mechanism} goes with strategy = collapipe, found "
            f'{config.strategy!r}; set privacy.update-mechanism = "local"'
        )
    if privacy.secure_aggregation:
        for key, found, wanted in (
            ("strategy", config.strategy, "collapipe"),
            ("aggregator.name", config.aggregator.name, "mean"),
            ("compression.update", config.compression.update, "none"),
            ("privacy.update-mechanism", privacy.update_mechanism, "local"),
        ):
            if found != wanted:
                raise ValueError(
                    f"privacy.secure-aggregation: it shows the server the mean of whole updates alone, and goes with "
                    f"{key} = {wanted}, found {found!r}; change one of them"
                )
    if privacy.update_mechanism.startswith("client") and config.compression.update != "none":
        raise ValueError(
            f"compression.update: {config.compression.update} sends no weights, which Flower's mod of "
            f"privacy.update-mechanism = {privacy.update_mechanism} would clip; leave one out"
        )
    if collapipe and config.optimizer.clip_norm and (privacy.update_noise or privacy.activation_noise):
        raise ValueError(
            f"optimizer.clip-norm: {config.optimizer.clip_norm:g} makes each control unit send how large its gradient "
            "was, which no noise of [privacy] hides; set it to 0"
        )


def check_shared_matrices(config: RunConfig, parts: ModelParts) -> None:
    """Refuse noise on a model whose embedding goes to the server between the steps of a round.

    Raises
    ------
    ValueError
        Naming the matrix, and what to do.
    """
    noisy = config.privacy.update_noise or config.privacy.activation_noise
    if config.strategy == "collapipe" and noisy and parts.tied and config.local_steps > 1:
        raise ValueError(
            f"privacy: the decoder of model.family = {config.model.family} reads the embedding's "
            f"{', '.join(parts.tied.values())}, which is sent to it as it is before every step after a round's first; "
            "set local-steps = 1, or use a family that shares no matrix"
        )
