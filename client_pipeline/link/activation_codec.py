"""Activations and their gradients in fewer bytes: half or 8-bit numbers with one scale for each token.

A token's row of D numbers becomes one row of bytes, so that what travels is a single tensor on either link::

    int8    D bytes of int8    then 4 of float32, the scale        x = scale * q,  scale = max|x| / 127
    fp16   2D bytes of half    then 4 of float32, the scale        x = scale * h,  scale = max|x|

fp16 has the scale, too: gradients of a mean over many tokens lie below the smallest normal half, 6e-5. A row that is
not finite stays so: the receiver refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.link.compression import ACTIVATIONS

_SCALE_BYTES = 4
_KINDS = {"fp16": (torch.float16, 1.0), "int8": (torch.int8, 127.0)}
"""Type of the numbers, and the value that a row's largest takes."""


@dataclass(frozen=True)
class ActivationCodec:
    """How tensors [B, T, D] of float32 travel."""

    name: str = "none"

    def __post_init__(self) -> None:
        """Refuse an unknown name."""
        if self.name not in ACTIVATIONS:
            raise ValueError(f"codec of the activations: expected one of {', '.join(ACTIVATIONS)}, found {self.name!r}")

    def row_bytes(self, width: int) -> int:
        """Bytes of one token of D = ``width`` numbers."""
        if self.name == "none":
            return torch.float32.itemsize * width
        return _KINDS[self.name][0].itemsize * width + _SCALE_BYTES

    def wire(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what travels of a float32 tensor of ``shape``."""
        if self.name == "none":
            return shape, torch.float32
        return (*shape[:-1], self.row_bytes(shape[-1])), torch.uint8

    def encode(self, x_BTD: Tensor) -> Tensor:
        """Return what travels: the tensor itself, or bytes [B, T, row]."""
        if self.name == "none":
            return x_BTD
        dtype, largest = _KINDS[self.name]
        x_BTD = x_BTD.detach()
        scale_BT1 = x_BTD.abs().amax(-1, keepdim=True).float() / largest
        values = x_BTD / torch.where(scale_BT1 == 0, 1.0, scale_BT1)
        values = (values.round() if dtype is torch.int8 else values).to(dtype)
        return torch.cat([values.view(torch.uint8), scale_BT1.view(torch.uint8)], dim=-1)

    def decode(self, wire: Tensor) -> Tensor:
        """Read what :meth:`encode` gave.

        Raises
        ------
        ValueError
            If it is not of this codec.
        """
        if self.name == "none":
            return wire
        dtype, _ = _KINDS[self.name]
        size = wire.shape[-1] - _SCALE_BYTES if wire.ndim == 3 else 0
        if wire.dtype != torch.uint8 or size < dtype.itemsize or size % dtype.itemsize:
            raise ValueError(
                f"expected the codec {self.name}, bytes [B, T, row], found {wire.dtype} {list(wire.shape)}"
            )
        values, scale = wire.split([size, _SCALE_BYTES], dim=-1)
        return values.contiguous().view(dtype).float() * scale.contiguous().view(torch.float32)
