"""Keys and values that attention keeps of earlier tokens, in the form that the transformers library asks them for.

Shape legend: R rows (sequences) that are computed together, K tokens of each so far with the new ones, T new ones, H
heads, D width of a head. A row that is shorter than others is padded at its beginning, so that all rows end together.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

CACHE_NAMES = ("cache", "past_key_values")
"""Names under which the library's models take a cache, of newer versions first."""
_ROOM = 64
"""Tokens for which a buffer has room beyond those that it holds."""


class NumKept(Cache):  # type: ignore[misc]
    """The number of earlier tokens, and nothing of them: what a model's loop asks its cache for."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of earlier tokens, of every layer."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the keys that a mask covers, and the place of the first."""
        return self.length + query_length, 0


class KeptKeys(NumKept):
    """Keys and values of some layers, for R rows.

    A step's new ones count only after :meth:`took`: a step that failed can be run again.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put the new keys [R, H, T, D] and values behind a layer's earlier ones; return all, [R, H, K, D]."""
        end = self.length + key_states.shape[2]
        new = (key_states, value_states)
        buffers = self._buffers.get(layer_idx)
        if buffers is None or buffers[0].shape[2] < end:
            earlier = (state[:, :, :0] for state in new) if buffers is None else buffers
            room = end + _ROOM
            buffers = tuple(  # type: ignore[assignment]
                _padded(tensor[:, :, : self.length], 0, room - self.length) for tensor in earlier
            )
            self._buffers[layer_idx] = buffers  # type: ignore[assignment]
        assert buffers is not None
        for buffer, state in zip(buffers, new, strict=True):
            buffer[:, :, self.length : end] = state
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def took(self, num_tokens: int) -> None:
        """Count a step's new tokens: all layers have them."""
        self.length += num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows in this order, with repeats."""
        self._buffers = {layer: (keys[beam_idx], values[beam_idx]) for layer, (keys, values) in self._buffers.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._buffers.values())

    def rows(self, first: int, number: int, length: int) -> KeptKeys:
        """Copy some rows, of which the last ``length`` tokens are kept."""
        part, begin = KeptKeys(), self.length - length
        part.length = length
        part._buffers = {
            layer: tuple(  # type: ignore[misc]
                tensor[first : first + number, :, begin : self.length].clone() for tensor in tensors
            )
            for layer, tensors in self._buffers.items()
        }
        return part

    @staticmethod
    def joined(parts: Sequence[KeptKeys]) -> KeptKeys:
        """Return the rows of all parts, one part behind the other."""
        if len(parts) == 1:
            return parts[0]
        whole = KeptKeys()
        whole.length = max(part.length for part in parts)
        for layer in parts[0]._buffers:
            whole._buffers[layer] = tuple(  # type: ignore[assignment]
                torch.cat(
                    [
                        _padded(part._buffers[layer][i][:, :, : part.length], whole.length - part.length, _ROOM)
                        for part in parts
                    ]
                )
                for i in (0, 1)
            )
        return whole


def _padded(tensor_RHKD: Tensor, before: int, behind: int) -> Tensor:
    return F.pad(tensor_RHKD, (0, 0, before, behind))


def cache_name(body: nn.Module) -> str:
    """Return the name under which a base model takes a cache; empty: it takes none that this module knows."""
    names = inspect.signature(body.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "")


def step_arguments(body: nn.Module, mask_RK: Tensor, num_new: int) -> dict[str, Any]:
    """Return what a base model's loop takes beside the new tokens.

    Parameters
    ----------
    body : the library's base model
    mask_RK : True at real tokens, of earlier ones and new ones
    num_new : T
    """
    arguments: dict[str, Any] = {
        "use_cache": True,
        "attention_mask": None if bool(mask_RK.all()) else mask_RK.long(),
        cache_name(body): NumKept(mask_RK.shape[1] - num_new),
    }
    if "position_ids" in inspect.signature(body.forward).parameters:
        arguments["position_ids"] = (mask_RK.long().cumsum(-1) - 1).clamp(min=0)[:, -num_new:]
    return arguments
