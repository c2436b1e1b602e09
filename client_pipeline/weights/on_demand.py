"""TEBs that have their frozen weights while they run, and not otherwise: no process holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.low_bits import fill_low_bits, low_bit_layers


class OnDemand:
    """Fills one TEB before it runs forward, and empties it after.

    Parameters
    ----------
    block : with adapters; its frozen parameters have no storage from here on
    weights : by the block's own names without adapters
    """

    def __init__(self, block: nn.Module, weights: FrozenBase) -> None:
        self._block = block
        self._weights = weights
        self._held = False
        self._slots = []
        for name, parameter in block.named_parameters():
            if not parameter.requires_grad:
                owner, _, leaf = name.rpartition(".")
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                self._slots.append((block.get_submodule(owner), leaf, name.replace(".base_layer.", "."), empty))
        self._release()
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._after, always_call=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the weights over several runs."""
        try:
            self._fill()
            self._held = True
            yield
        finally:
            self._held = False
            self._release()

    def _before(self, *_: object) -> None:
        if not self._held:
            self._fill()

    def _after(self, *_: object) -> None:
        if not self._held:
            self._release()

    def _fill(self) -> None:
        for module, leaf, name, _ in self._slots:
            setattr(module, leaf, nn.Parameter(self._weights[name], requires_grad=False))
        if any(low_bit_layers(self._block)):
            fill_low_bits(self._block, self._weights)
            # What is in few bits now is not needed as it was.
            self._weights.release()

    def _release(self) -> None:
        for module, leaf, _, empty in self._slots:
            setattr(module, leaf, empty)
        for _, layer in low_bit_layers(self._block):
            layer.release()
        self._weights.release()
