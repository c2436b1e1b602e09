"""Frozen weights of a fresh language model: each part is drawn from a seed of its own, by whoever runs it.

What travels is the run's seed. A control unit draws the embedding, a device its TEBs, the server its head, and the same
part is the same everywhere. Nobody draws, holds or sends the whole. Only frozen weights of the library's decoder-only
families are drawn so: other fresh models are one draw over the whole model, as they always were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from client_pipeline.documents import json_value
from client_pipeline.families.registry import family_named, is_decoder_only, library_family
from client_pipeline.partition.dropout_seed import drawn_aside, undisturbed
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.weights.base_weights import BaseWeights, FrozenBase
from client_pipeline.weights.unfilled import adopt

_SEED_KEY = "seed-of-fresh-weights"


class FreshBase(FrozenBase):
    """Fresh frozen float32 weights by name, drawn when one of their part is asked for, and kept until :meth:`release`.

    Names are those of the model without adapters: global ones, or of :meth:`part` the part's own.

    Parameters
    ----------
    spec : the model; its adapters do not matter
    seed : the run's
    prefix : of the part: ``embedding.``, ``blocks.<i>.`` or ``head.``; empty: embedding and all TEBs
    """

    def __init__(self, spec: ModelSpec, seed: int, prefix: str = "") -> None:
        self._spec = replace(spec, lora=None, base_dtype="float32")
        self._seed = seed
        self._prefix = prefix
        self._drawn: dict[str, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # What was drawn is drawn again elsewhere.
        return FreshBase, (self._spec, self._seed, self._prefix)

    def check(self) -> FreshBase:
        """Return this: there is no file that could be another one."""
        return self

    def part(self, prefix: str) -> FreshBase:
        """Weights of one part, ``embedding.``, ``blocks.<i>.`` or ``head.``, under its own names."""
        assert not self._prefix
        return FreshBase(self._spec, self._seed, prefix)

    def release(self) -> None:
        """Forget what was drawn."""
        self._drawn = {}

    def stored(self, name: str) -> Tensor:
        """Return a tensor: float32."""
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        if self._prefix:
            if not self._drawn:
                self._drawn = _draw(self._spec, self._prefix, self._seed)
            return self._drawn[name]
        prefix = next((prefix for prefix in self._prefixes() if name.startswith(prefix)), "")
        if not prefix:
            raise KeyError(name)
        return self.part(prefix)[name.removeprefix(prefix)]

    def __iter__(self) -> Iterator[str]:
        if self._prefix:
            return iter(_names(self._spec, self._prefix))
        return (prefix + name for prefix in self._prefixes() for name in _names(self._spec, prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _prefixes(self) -> list[str]:
        num_blocks = family_named(self._spec.family).num_blocks(self._spec)
        return ["embedding.", *(f"blocks.{index}." for index in range(num_blocks))]

    def to_json(self) -> str:
        """Write what another machine needs beside the specification."""
        return json.dumps({_SEED_KEY: self._seed})


def frozen_base(text: str, spec: ModelSpec, source: str = "") -> FrozenBase:
    """Read what :meth:`FrozenBase.to_json` wrote.

    Parameters
    ----------
    text : from another machine, or from a file
    spec : the model's
    source : folder or hub id of its files on this machine; empty: as on the other

    Raises
    ------
    ValueError
        If the text is something else.
    """
    raw = None
    with suppress(ValueError):
        raw = json_value(text)
    if not isinstance(raw, dict) or _SEED_KEY not in raw:
        return BaseWeights.from_json(text, source)
    seed = raw[_SEED_KEY]
    if not isinstance(seed, int) or isinstance(seed, bool) or not is_decoder_only(spec.family):
        raise ValueError(
            f"frozen weights: expected the seed of fresh weights of a decoder-only family, found {seed!r:.40} of "
            f"{spec.family}"
        )
    return FreshBase(spec, seed)


def _unfilled_part(spec: ModelSpec, prefix: str) -> nn.Module:
    with undisturbed():
        return family_named(spec.family).unfilled_part(spec, prefix.removesuffix("."))


def _names(spec: ModelSpec, prefix: str) -> list[str]:
    return [name for name, _ in _unfilled_part(spec, prefix).named_parameters()]


def _draw(spec: ModelSpec, prefix: str, seed: int) -> dict[str, Tensor]:
    """Draw a part as the library draws it in a whole model, from its own seed."""
    part = _unfilled_part(spec, prefix)
    adopt(part, {name: torch.full(p.shape, torch.nan) for name, p in part.named_parameters()}, f"fresh part {prefix}")
    digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
    with drawn_aside(int.from_bytes(digest[:8], "little") >> 1):
        library_family(spec.family).initialise(part, spec)
    weights = {name: p.detach() for name, p in part.named_parameters()}
    assert not any(value.isnan().any() for value in weights.values()), "the library leaves a weight of a part unset"
    return weights
