"""A micro-batch of a causal model cut along the sequence into slices, which enter the pipeline one after the other.

A token sees itself and what came before it, so a slice needs nothing of later ones. Of earlier ones it needs keys and
values, in every layer; each stage keeps them. The first of three slices, and the others behind it::

    queries of     keys and values of
    slice 0        0                        F0 F1 F2 then B2 B1 B0
    slice 1        0 1
    slice 2        0 1 2

What is kept has no graph: a backward pass ends there, and leaves in ``.grad`` what the later slices have to say of it.
Backward passes go through the slices in reverse order, so that all of that is there when a slice's own turn comes; it
is then added to the gradient of the keys and values that the slice itself made. Each graph is gone through once, and
the sums are those of the micro-batch as a whole.

This is the token-level pipelining of TeraPipe (Li et al., arXiv:2102.07988), with slices of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from client_pipeline.partition.plan import micro_batch_sizes

_SEQUENCE = 2
"""Dimension of the tokens in keys and values, [B, heads, T, D of a head]."""


def slice_lengths(length: int, num_slices: int) -> list[int]:
    """Tokens of each of Q slices of T tokens: as equal as possible, longer ones first.

    >>> slice_lengths(7, 3)
    [3, 2, 2]
    """
    return micro_batch_sizes(length, num_slices)


def joined_slices(slices: Sequence[Tensor]) -> Tensor:
    """Return the slices [B, t, D] of a micro-batch as one, [B, T, D]; one alone as it is."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices), dim=1)


class _Kept(torch.autograd.Function):
    """Hands keys or values on as they are; their gradient is joined by that of the copy that later slices use."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, kept: Tensor) -> Tensor:
        ctx.kept = kept
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient if ctx.kept.grad is None else gradient + ctx.kept.grad, None


class KeptKeys:
    """Keys and values of one micro-batch on one stage, by layer and slice."""

    def __init__(self) -> None:
        self._by_layer: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def join(self, layer: int, number: int, made: tuple[Tensor, Tensor], is_last: bool) -> tuple[Tensor, Tensor]:
        """Keep what a slice made, unless it is the last one; return keys and values of all tokens up to its end."""
        kept = self._by_layer.setdefault(layer, [])
        if is_last:
            return _concatenated([*kept, made])
        if number == len(kept):
            # A second forward pass, of who recomputes, finds its own: later slices have left their gradients there.
            # Copies: some layers make queries, keys and values as one tensor, which a part of it would hold whole.
            keys, values = (tensor.detach().clone().requires_grad_() for tensor in made)
            kept.append((keys, values))
        pair = (_Kept.apply(tensor, of) for tensor, of in zip(made, kept[number], strict=True))  # type: ignore[no-untyped-call]
        keys, values = pair
        return _concatenated([*kept[:number], (keys, values)])

    def nbytes_of(self, number: int) -> int:
        """Bytes that are kept of a slice."""
        return sum(t.nbytes for kept in self._by_layer.values() for pair in kept[number : number + 1] for t in pair)

    def forget(self, number: int) -> None:
        """Drop a slice, and those after it: its backward pass is done."""
        for kept in self._by_layer.values():
            del kept[number:]


def _concatenated(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    keys, values = (torch.cat(parts, _SEQUENCE) for parts in zip(*pairs, strict=True))
    return keys, values


@dataclass(frozen=True, kw_only=True)
class TokenSlice:
    """One slice, as the causal families' blocks take it in the place of a mask.

    It is also what the transformers library's attention layers call a cache.
    """

    number: int
    """q, from 0."""
    first: int
    """Position of its first token in the sequence."""
    end: int
    """Position behind its last token."""
    mask_BT: Tensor
    """Padding mask of the whole micro-batch, bool."""
    kept: KeptKeys
    """Shared by the slices of the micro-batch."""

    @property
    def length(self) -> int:
        """T, tokens of the whole sequence."""
        return self.mask_BT.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept of it for later slices."""
        return self.kept.nbytes_of(self.number)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take a layer's keys and values, [B, heads, t, D of a head]; return those of all tokens up to its end."""
        return self.kept.join(layer, self.number, (keys, values), is_last=self.end == self.length)

    def to(self, device: torch.device) -> TokenSlice:
        """The same with its mask on a device; keys and values are where they were computed."""
        return self if self.mask_BT.device == device else replace(self, mask_BT=self.mask_BT.to(device))

    def forget(self) -> None:
        """Drop what is kept of it: its backward pass is done, and those of all later ones."""
        self.kept.forget(self.number)


def token_slices(mask_BT: Tensor, num_slices: int) -> list[TokenSlice]:
    """Cut a micro-batch with this padding mask into slices, on a stage that holds nothing of it yet."""
    kept, slices, first = KeptKeys(), [], 0
    for number, length in enumerate(slice_lengths(mask_BT.shape[1], num_slices)):
        end = first + length
        slices.append(TokenSlice(number=number, first=first, end=end, mask_BT=mask_BT, kept=kept))
        first = end
    return slices
