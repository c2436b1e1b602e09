"""Answers of one device: its TEBs, with the keys and values of all requests.

The requests of a step are computed together, and share their buffers. When others come into a step or leave it, their
rows are copied into new buffers once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # the library's cache is imported where answers are written alone
    from client_pipeline.families.kept_keys import KeptKeys


@dataclass(frozen=True, kw_only=True)
class AnswerStep:
    """New tokens of some requests."""

    requests: tuple[str, ...]
    """In the order of their rows."""
    num_rows: tuple[int, ...]
    """Rows of each request."""
    mask_RK: Tensor
    """True at real tokens of all rows, of earlier and new ones; rows end together."""
    order: Tensor | None = None
    """The earlier row that each row goes on from, where beams were chosen."""


@dataclass
class _Part:
    """A request's rows in a group."""

    first: int
    number: int
    length: int
    """Its earlier tokens, with the padding of its own rows."""


class _Group:
    """Requests whose rows stand one behind the other in the same buffers."""

    def __init__(self, requests: Sequence[str], parts: Sequence[tuple[int, KeptKeys]]) -> None:
        from client_pipeline.families.kept_keys import KeptKeys

        self.parts: dict[str, _Part] = {}
        first = 0
        for request, (number, keys) in zip(requests, parts, strict=True):
            self.parts[request] = _Part(first, number, keys.length)
            first += number
        self.keys = KeptKeys.joined([keys for _, keys in parts])

    def part(self, request: str) -> tuple[int, KeptKeys]:
        """Copy a request's rows; returns their number, too."""
        part = self.parts[request]
        return part.number, self.keys.rows(part.first, part.number, part.length)


class KeptRequests:
    """Keys and values on one device."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def of_step(self, step: AnswerStep) -> KeptKeys:
        """Return the keys and values of a step's requests, together."""
        group = next((group for group in self._groups if tuple(group.parts) == step.requests), None)
        if group is None:
            parts = [self._part(*each) for each in zip(step.requests, step.num_rows, strict=True)]
            self.drop(step.requests)
            group = _Group(step.requests, parts)
            self._groups.append(group)
        if step.order is not None:
            group.keys.reorder_cache(step.order)
        return group.keys

    def took(self, step: AnswerStep, num_new: int) -> None:
        """Count a step's new tokens: all TEBs have them."""
        group = next(group for group in self._groups if tuple(group.parts) == step.requests)
        group.keys.took(num_new)
        for part in group.parts.values():
            part.length += num_new

    def _part(self, request: str, number: int) -> tuple[int, KeptKeys]:
        from client_pipeline.families.kept_keys import KeptKeys

        return next((group.part(request) for group in self._groups if request in group.parts), (number, KeptKeys()))

    def drop(self, requests: Sequence[str]) -> None:
        """Forget requests; others of their groups stay."""
        for group in list(self._groups):
            left = [request for request in group.parts if request not in requests]
            if len(left) < len(group.parts):
                self._groups.remove(group)
                if left:
                    self._groups.append(_Group(left, [group.part(request) for request in left]))

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(group.keys.nbytes for group in self._groups)


def answer_step(
    blocks: Mapping[int, Any],
    kept: KeptRequests,
    step: AnswerStep,
    x_RTD: Tensor,
    mask_form: Callable[[Tensor, torch.dtype], Any] | None = None,
) -> Tensor:
    """Pass new tokens through TEBs, in evaluation, [R, T, D].

    Parameters
    ----------
    blocks : by index
    kept : keys and values of these TEBs, to which those of the new tokens are added
    step : whose tokens
    x_RTD : their states
    mask_form : of an encoder's TEBs: all tokens come at once and see each other, and nothing is kept of them
    """
    for block in blocks.values():
        if block.training:
            block.eval()
    with torch.no_grad():
        if mask_form is not None:
            mask = mask_form(step.mask_RK.to(x_RTD.device), x_RTD.dtype)
            for block in blocks.values():
                x_RTD = block(x_RTD, mask)
            return x_RTD
        keys, num_new = kept.of_step(step), x_RTD.shape[1]
        for block in blocks.values():
            x_RTD = block.step(x_RTD, step.mask_RK, keys)
    kept.took(step, num_new)
    return x_RTD
