"""Which models can be cut into token slices, and why others cannot."""

# Alone: the families' blocks import the slices, and who asks this imports the families.

from __future__ import annotations

from dataclasses import replace

from client_pipeline.partition.families import dropouts
from client_pipeline.partition.spec import CAUSAL_LM, GROUPED_FAMILIES, ModelSpec, is_outside

SLICED_FAMILIES = ("gpt2", *GROUPED_FAMILIES)
"""Families whose blocks take slices: decoder-only models, with a sliding window or without."""


def takes_token_slices(spec: ModelSpec) -> bool:
    """Whether :func:`check_token_slices` lets a model pass."""
    return _is_causal(spec) and not dropouts(spec)


def _is_causal(spec: ModelSpec) -> bool:
    return spec.head == CAUSAL_LM and not is_outside(spec.family)


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
            f"{setting}: expected a decoder-only model, {', '.join(SLICED_FAMILIES)}, whose tokens see none that come "
            f"later, found model.family {spec.family} with the head {spec.head}; leave token slices at 1"
        )
    if rates := dropouts(spec):
        rate_texts = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
        raise ValueError(
            f"{setting}: expected a model without dropout, whose masks are drawn for whole micro-batches, "
            f"found {rate_texts}; set dropout to 0, in model.dropout or in the folder's config.json, or leave token "
            "slices at 1"
        )


def without_dropout(spec: ModelSpec) -> ModelSpec:
    """Return a model that drops nothing, and is the same otherwise."""
    lora = None if spec.lora is None else replace(spec.lora, dropout=0.0)
    plain = replace(spec, lora=lora)
    return replace(plain, config=plain.config | dict.fromkeys(dropouts(plain), 0.0))
