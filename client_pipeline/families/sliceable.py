"""Models that can be cut into token slices, and the reason where one cannot."""

# Alone: the families' blocks import the slices, and who asks this imports the families.

from __future__ import annotations

from client_pipeline.families.families import dropouts
from client_pipeline.families.proof import slices_difference
from client_pipeline.families.registry import is_decoder_only
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec


def takes_token_slices(spec: ModelSpec) -> bool:
    """Return whether :func:`check_token_slices` lets a model pass."""
    return _is_causal(spec) and not dropouts(spec) and not slices_difference(spec)


def _is_causal(spec: ModelSpec) -> bool:
    return spec.head == CAUSAL_LM and is_decoder_only(spec.family)


def check_token_slices(spec: ModelSpec, setting: str) -> None:
    """Refuse token slices of a model whose gradients they would change.

    Parameters
    ----------
    spec : the model
    setting : what asks for slices, for the message

    Raises
    ------
    ValueError
        If its tokens see later ones, or it has dropout: masks are drawn for whole micro-batches.
    """
    if not _is_causal(spec):
        raise ValueError(
            f"{setting}: expected a decoder-only model, such as llama or gpt2, whose tokens see none that come "
            f"later, found model.family {spec.family} with the head {spec.head}; leave token slices at 1"
        )
    if rates := dropouts(spec):
        rate_texts = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
        raise ValueError(
            f"{setting}: expected a model without dropout, whose masks are drawn for whole micro-batches, "
            f"found {rate_texts}; set dropout to 0, in model.dropout or in the folder's config.json, or leave token "
            "slices at 1"
        )
    if difference := slices_difference(spec):
        raise ValueError(
            f"{setting}: model type {spec.family!r} cannot be cut into slices: {difference}; leave token slices at 1"
        )
