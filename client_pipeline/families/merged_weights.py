"""Weights of the plain model that computes what one with adapters does, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import undisturbed
from client_pipeline.partition.parts import ModelParts, tied_names
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.low_bits import LowBitLinear
from client_pipeline.weights.unfilled import adopt


class MergedWeights(Mapping[str, Tensor]):
    """Weights by the plain model's global names, each made when it is asked for: W + alpha/r B A where B A is trained.

    W is what its TEB computes with: rounded, where the base is in few bits. Tensors of one part follow each other best.

    Parameters
    ----------
    spec : of the model, with adapters or without
    weights : by global name: all that is trained; and the frozen weights, where there is no ``base``
    base : the frozen weights
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], base: FrozenBase | None = None) -> None:
        self._spec = spec
        self._plain = replace(spec, lora=None, base_dtype="float32")
        self._family = family_named(spec.family)
        self._weights = weights
        self._base = base
        self._place = ""
        self._part: nn.Module = nn.Identity()
        self._part_base: FrozenBase | None = None

    def __getitem__(self, name: str) -> Tensor:
        place, own_name = place_of(name)
        self._go_to(place)
        path, _, leaf = own_name.rpartition(".")
        stored_name = next((n for n in (name, f"{place}.{path}.base_layer.{leaf}") if n in self._weights), "")
        if stored_name:
            value = self._weights[stored_name]
        elif self._part_base is not None:
            value = self._part_base[own_name]
        else:
            raise KeyError(name)
        return value.detach() if leaf != "weight" else self._adapted(value.detach(), place, path)

    def __iter__(self) -> Iterator[str]:
        places = [f"blocks.{index}" for index in range(self._family.num_blocks(self._plain))]
        for place in ("embedding", *places, "head"):
            self._go_to(place)
            tied = tied_names(self._part)
            for name, parameter in self._part.named_parameters():
                if parameter.requires_grad and name not in tied:
                    yield f"{place}.{name}"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def plain(self) -> ModelSpec:
        """The model without adapters."""
        return self._plain

    def of_part(self, place: str) -> dict[str, Tensor]:
        """Return all trained tensors of ``embedding``, ``blocks.<i>`` or ``head`` by the part's own names.

        A tensor that the head shares with the embedding is among them.

        Raises
        ------
        ValueError
            If one is missing.
        """
        self._go_to(place)
        tied = self._family.tied(self._plain) if place == "head" else {}
        names = {name: f"{place}.{name}" for name, p in self._part.named_parameters() if p.requires_grad}
        names |= {name: f"embedding.{of}" for name, of in tied.items() if name in names}
        try:
            return {name: self[global_name].float() for name, global_name in names.items()}
        except KeyError as error:
            raise ValueError(
                f"weights of the {place}: {error.args[0]} is missing; load weights of the same architecture"
            ) from None

    def build_part(self, place: str) -> nn.Module:
        """Build a part of the plain model over these tensors, in evaluation; those without adapters stay in files.

        Raises
        ------
        ValueError
            If a tensor is missing or has another shape.
        """
        with undisturbed():
            return self._filled(self._family.unfilled_part(self._plain, place), place)

    def build(self, blocks: bool = True) -> ModelParts:
        """Build the plain model, as :meth:`build_part` does a part; without ``blocks`` the TEBs have shapes alone."""
        with undisturbed():
            parts = self._family.unfilled_model(self._plain)
            name_of = {parameter: name for name, parameter in parts.all_parameters()}
            indices = range(len(parts.blocks) if blocks else 0)
            for place in ("embedding", *(f"blocks.{index}" for index in indices)):
                self._filled(parts.part(place), place)
            tied = self._family.tied(self._plain)
            self._filled(parts.head, "head", {name: parts.embedding.get_parameter(of) for name, of in tied.items()})
        if parts.reference is not None:
            filled, of_library = dict(parts.all_parameters()), {}
            for name, parameter in parts.reference.named_parameters(remove_duplicate=False):
                if parameter in name_of:
                    parameter = filled[name_of[parameter]]
                elif parameter.is_meta:
                    # BART has a common table that nobody reads where encoder and decoder have their own.
                    parameter = nn.Parameter(torch.zeros(parameter.shape))
                of_library[name] = parameter
            adopt(parts.reference, of_library, "library's model")
            parts.reference.eval()
        return parts

    def _filled(self, part: nn.Module, place: str, shared: Mapping[str, Tensor] = MappingProxyType({})) -> nn.Module:
        weights = self.of_part(place) | dict(shared)
        if not all(parameter.requires_grad for parameter in part.parameters()):
            # Tables that are computed come with the part.
            weights = dict(self._family.build_part(self._plain, place).named_parameters()) | weights
        adopt(part, weights, place)
        return part.eval()

    def release(self) -> None:
        """Give back the memory of the frozen weights that were asked for last."""
        if self._part_base is not None:
            self._part_base.release()

    def _go_to(self, place: str) -> None:
        if place != self._place:
            self.release()
            self._place = place
            self._part = self._family.unfilled_part(self._plain, place)
            self._part_base = None if self._base is None else self._base.part(f"{place}.")

    def _adapted(self, matrix: Tensor, place: str, path: str) -> Tensor:
        from transformers.pytorch_utils import Conv1D

        layer, lora = self._part.get_submodule(path), self._spec.lora
        is_transposed = isinstance(layer, Conv1D)
        if self._base is not None and self._spec.low_bits and place.startswith("blocks."):
            if is_transposed or isinstance(layer, nn.Linear):
                shape = matrix.T.shape if is_transposed else matrix.shape
                matrix = LowBitLinear(None, shape, self._spec.base_dtype, is_transposed).rounded(matrix)
        a_name, b_name = (f"{place}.{path}.lora_{factor}.default.weight" for factor in "AB")
        if lora is None or a_name not in self._weights:
            return matrix
        product = self._weights[b_name].detach() @ self._weights[a_name].detach()
        return matrix + (product.T if is_transposed else product) * (lora.alpha / lora.rank)


def place_of(name: str) -> tuple[str, str]:
    """Split a global name: ``embedding``, ``blocks.<i>`` or ``head``, and the part's own name."""
    words = name.split(".", 2 if name.startswith("blocks.") else 1)
    return ".".join(words[:-1]), words[-1]
