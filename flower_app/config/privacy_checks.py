"""What a run's privacy settings cannot mean: found before any work starts."""

from __future__ import annotations

from collections.abc import Collection

from client_pipeline.link.privacy import PrivacyConfig


def check_privacy(privacy: PrivacyConfig, *, strategy: str, aggregator: str, update: str, clip_norm: float) -> None:
    """Refuse settings that would guarantee nothing, or that nothing obeys.

    Parameters
    ----------
    privacy : the settings
    strategy, aggregator : names of the run's
    update : how updates are compressed
    clip_norm : of the optimizer; 0 without clipping

    Raises
    ------
    ValueError
        Naming the key, and what to do.
    """
    collapipe = strategy == "collapipe"
    if privacy.on_activations and not collapipe:
        raise ValueError(
            f"privacy.activation-clip: with strategy = {strategy} no activation leaves its cluster, found "
            f"{privacy.activation_clip:g}; leave it out"
        )
    if privacy.on_updates and strategy == "pipeline":
        raise ValueError("privacy.update-clip: strategy = pipeline uploads no update; leave it out")
    if privacy.update_mechanism != "local" and not collapipe:
        raise ValueError(
            f"privacy.update-mechanism: {privacy.update_mechanism} goes with strategy = collapipe, found "
            f'{strategy!r}; set privacy.update-mechanism = "local"'
        )
    if privacy.secure_aggregation:
        for key, found, wanted in (
            ("strategy", strategy, "collapipe"),
            ("aggregator.name", aggregator, "mean"),
            ("compression.update", update, "none"),
            ("privacy.update-mechanism", privacy.update_mechanism, "local"),
        ):
            if found != wanted:
                raise ValueError(
                    f"privacy.secure-aggregation: it shows the server the mean of whole updates alone, and goes with "
                    f"{key} = {wanted}, found {found!r}; change one of them"
                )
    if privacy.update_mechanism.startswith("client") and update != "none":
        raise ValueError(
            f"compression.update: {update} sends no weights, which Flower's mod of "
            f"privacy.update-mechanism = {privacy.update_mechanism} would clip; leave one out"
        )
    if collapipe and clip_norm and (privacy.update_noise or privacy.activation_noise):
        raise ValueError(
            f"optimizer.clip-norm: {clip_norm:g} makes each control unit send how large its gradient "
            "was, which no noise of [privacy] hides; set it to 0"
        )


def check_shared_matrices(
    privacy: PrivacyConfig, *, strategy: str, local_steps: int, family: str, shared: Collection[str]
) -> None:
    """Refuse noise on a model whose embedding goes to the server between the steps of a round.

    Parameters
    ----------
    privacy : the settings
    strategy, local_steps, family : of the run
    shared : matrices of the embedding that the decoder reads

    Raises
    ------
    ValueError
        Naming the matrix, and what to do.
    """
    noisy = privacy.update_noise or privacy.activation_noise
    if strategy == "collapipe" and noisy and shared and local_steps > 1:
        raise ValueError(
            f"privacy: the decoder of model.family = {family} reads the embedding's "
            f"{', '.join(shared)}, which is sent to it as it is before every step after a round's first; "
            "set local-steps = 1, or use a family that shares no matrix"
        )
