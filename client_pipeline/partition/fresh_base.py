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
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.base_weights import BaseWeights, FrozenBase
from client_pipeline.partition.default_generator import drawn_aside, undisturbed
from client_pipeline.partition.hugging_face import model_class
from client_pipeline.partition.spec import ModelSpec, has_seeds_of_parts
from client_pipeline.partition.unfilled import adopt, no_storage

_SEED_KEY = "seed-of-fresh-weights"
_EMBEDDING, _HEAD, _BLOCKS = "embedding.", "head.", "blocks."


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
        return [_EMBEDDING, *(f"{_BLOCKS}{index}." for index in range(_family(self._spec).num_blocks(self._spec)))]

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
        raw = json.loads(text)
    if not isinstance(raw, dict) or _SEED_KEY not in raw:
        return BaseWeights.from_json(text, source)
    seed = raw[_SEED_KEY]
    if not isinstance(seed, int) or isinstance(seed, bool) or not has_seeds_of_parts(spec.family):
        raise ValueError(
            f"frozen weights: expected the seed of fresh weights of a decoder-only family, found {seed!r:.40} of "
            f"{spec.family}"
        )
    return FreshBase(spec, seed)


def _family(spec: ModelSpec) -> Any:
    # That module builds parts over weights of this one.
    from client_pipeline.partition.families import adapter

    return adapter(spec.family)


def _unfilled_part(spec: ModelSpec, prefix: str) -> nn.Module:
    """Build a part whose weights have shapes alone."""
    family = _family(spec)
    with undisturbed(), no_storage():
        if prefix == _EMBEDDING:
            return cast(nn.Module, family.build_embedding(spec))
        if prefix == _HEAD:
            return cast(nn.Module, family.build_head(spec))
        return cast(nn.Module, family.build_block(spec, int(prefix.removeprefix(_BLOCKS).removesuffix("."))))


def _names(spec: ModelSpec, prefix: str) -> list[str]:
    return [name for name, _ in _unfilled_part(spec, prefix).named_parameters()]


def _draw(spec: ModelSpec, prefix: str, seed: int) -> dict[str, Tensor]:
    """Draw a part as the library draws it in a whole model, from its own seed."""
    part, initialise = _unfilled_part(spec, prefix), _initialiser(spec.to_json())
    unset = {name: torch.full(p.shape, torch.nan) for name, p in part.named_parameters()}
    adopt(part, unset, f"fresh part {prefix}")
    digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
    with drawn_aside(int.from_bytes(digest[:8], "little") >> 1):
        part.apply(initialise)
    weights = {name: p.detach() for name, p in part.named_parameters()}
    assert not any(value.isnan().any() for value in weights.values()), "the library leaves a weight of a part unset"
    return weights


@cache
def _initialiser(spec_json: str) -> Any:
    """Return the library's function that draws one module of a model, by the settings of the whole."""
    spec = ModelSpec.from_json(spec_json)
    config = _family(spec).library_config(spec)
    with torch.device("meta"), undisturbed():
        return model_class(spec.head, config)(config)._init_weights
