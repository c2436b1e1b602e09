"""The model families that can be split, and the way from a specification to its parts."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.parts import MaskForm, ModelParts
from client_pipeline.partition.spec import ModelSpec

_MODULES = {
    "transformer": "client_pipeline.partition.transformer",
    "bert": "client_pipeline.partition.bert",
    "bart": "client_pipeline.partition.bart",
    "marian": "client_pipeline.partition.bart",
    "t5": "client_pipeline.partition.t5",
    "gpt2": "client_pipeline.partition.gpt2",
    "llama": "client_pipeline.partition.llama",
    "mistral": "client_pipeline.partition.llama",
    "qwen2": "client_pipeline.partition.llama",
    "qwen3": "client_pipeline.partition.llama",
}


class Adapter(Protocol):
    """What a family's module provides. A new family is one module with these functions."""

    def build_parts(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model with fresh weights, drawn from torch's global generator."""
        ...

    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build the embedding alone, for a control unit."""
        ...

    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build TEB ``index`` alone, for a device."""
        ...

    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build the decoder or head alone, for the server."""
        ...

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Turn the padding mask into the form that the blocks take."""
        ...

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        ...

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        ...


def families() -> list[str]:
    """Names of the supported families."""
    return sorted(_MODULES)


def adapter(family: str) -> Adapter:
    """Return the adapter of a family.

    Raises
    ------
    ValueError
        For an unknown family; the message lists the supported ones and says where to add one.
    """
    if family not in _MODULES:
        raise ValueError(
            f"model family {family!r} is not supported; expected one of {', '.join(families())}. To add one, write "
            "client_pipeline/partition/<family>.py with the functions of Adapter and name it in families.py"
        )
    return cast(Adapter, importlib.import_module(_MODULES[family]))


def build_parts(spec: ModelSpec, seed: int) -> ModelParts:
    """Build a model with fresh weights that depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return adapter(spec.family).build_parts(spec)


def tied_matrices(spec: ModelSpec) -> dict[str, str]:
    """What the head reads from the embedding, as the family's ``tied(spec)`` says: see ``ModelParts.tied``."""
    tied = getattr(adapter(spec.family), "tied", None)
    return dict(tied(spec)) if tied is not None else {}


def num_blocks_of(spec: ModelSpec) -> int:
    """L, the TEBs of a model."""
    return adapter(spec.family).num_blocks(spec)
