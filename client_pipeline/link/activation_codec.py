"""Activations and their gradients in fewer bytes: half, 8-, 4- or 2-bit numbers with scales for each token.

A token's row of D numbers becomes one row of bytes, so that what travels is a single tensor on either link::

    fp16   2D bytes of half    then 4 of float32, the scale        x = scale * h,  scale = max|x|
    int8    D bytes of int8    then 4 of float32, the scale        x = scale * q,  scale = max|x| / 127
    int4   D/2 bytes           then D/32 exponents, and the scale  x = scale * 2^(-e/16) * q / 7,  q in -7..7
    int2   D/4 bytes           then D/32 exponents, and the scale  x = scale * 2^(-e/16) * q / 3,  q in -3, -1, 1, 3

fp16 has the scale, too: gradients of a mean over many tokens lie below the smallest normal half, 6e-5. With few bits
each group of 32 numbers has a scale of its own, the row's times a power of two: some numbers of a language model's
states are a thousand times the others. A row that is not finite stays so: the receiver refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from client_pipeline.link.compression import ACTIVATIONS

_SCALE_BYTES = 4
QUANTIZED = {"fp16": (torch.float16, 1.0), "int8": (torch.int8, 127.0)}
"""Type of the numbers, and the value that the largest number of a row takes."""
FEW_BITS = {"int4": (4, 7), "int2": (2, 3)}
"""Bits of a number, and the value that the largest number of a group takes."""
_GROUP = 32
_STEPS = 16
"""Steps of a group's exponent in a factor of two."""


def quantized(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Divide each row (last dimension) by its scale, and round it to a kind of :data:`QUANTIZED`.

    Returns
    -------
    Numbers, of the shape of ``x``; scales, float32, with a last dimension of 1.
    """
    dtype, largest = QUANTIZED[kind]
    scale = x.abs().amax(-1, keepdim=True).float() / largest
    values = x / torch.where(scale == 0, 1.0, scale)
    return (values.round() if dtype is torch.int8 else values).to(dtype), scale


@dataclass(frozen=True)
class ActivationCodec:
    """Form in which float32 tensors [B, T, D] travel."""

    name: str = "none"

    def __post_init__(self) -> None:
        """Refuse an unknown name."""
        if self.name not in ACTIVATIONS:
            raise ValueError(f"codec of the activations: expected one of {', '.join(ACTIVATIONS)}, found {self.name!r}")

    def row_bytes(self, width: int) -> int:
        """Bytes of one token of D = ``width`` numbers."""
        if self.name == "none":
            return torch.float32.itemsize * width
        if self.name in FEW_BITS:
            bits, groups = FEW_BITS[self.name][0], -(-width // _GROUP)
            if width % (8 // bits):
                raise ValueError(
                    f"compression.activations: {self.name} packs {8 // bits} numbers in a byte, found a model of width "
                    f"{width}; use int8"
                )
            return width * bits // 8 + groups + _SCALE_BYTES
        return QUANTIZED[self.name][0].itemsize * width + _SCALE_BYTES

    def wire(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what travels of a float32 tensor of ``shape``."""
        if self.name == "none":
            return shape, torch.float32
        return (*shape[:-1], self.row_bytes(shape[-1])), torch.uint8

    def encode(self, x_BTD: Tensor) -> Tensor:
        """Return what travels: the tensor itself, or bytes [B, T, row]."""
        if self.name == "none":
            return x_BTD
        if self.name in FEW_BITS:
            return _packed(x_BTD.detach().float(), *FEW_BITS[self.name])
        values, scale_BT1 = quantized(x_BTD.detach(), self.name)
        return torch.cat([values.view(torch.uint8), scale_BT1.view(torch.uint8)], dim=-1)

    def _width_of(self, row: int) -> int:
        """Return the numbers of a row of bytes; 0 if no row is so long."""
        size = row - _SCALE_BYTES
        if self.name in FEW_BITS:
            bits = FEW_BITS[self.name][0]
            groups = -(-size // (_GROUP * bits // 8 + 1))
            numbers, rest = divmod((size - groups) * 8, bits)
        else:
            numbers, rest = divmod(size, QUANTIZED[self.name][0].itemsize)
        is_row = size > 0 and not rest and numbers > 0 and self.row_bytes(numbers) == row
        return numbers if is_row else 0

    def decode(self, wire: Tensor) -> Tensor:
        """Read what :meth:`encode` gave.

        Raises
        ------
        ValueError
            If it is not of this codec.
        """
        if self.name == "none":
            return wire
        width = self._width_of(wire.shape[-1]) if wire.ndim == 3 and wire.dtype == torch.uint8 else 0
        if not width:
            raise ValueError(
                f"expected the codec {self.name}, bytes [B, T, row], found {wire.dtype} {list(wire.shape)}"
            )
        values, scale = wire.split([wire.shape[-1] - _SCALE_BYTES, _SCALE_BYTES], dim=-1)
        # A copy: as a view of one row it might begin anywhere.
        scale_BT1 = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
        if self.name in FEW_BITS:
            return _unpacked(values, scale_BT1, width, *FEW_BITS[self.name])
        return values.contiguous().view(QUANTIZED[self.name][0]).float() * scale_BT1


def _packed(x_BTD: Tensor, bits: int, largest: int) -> Tensor:
    width = x_BTD.shape[-1]
    scale_BT1 = x_BTD.abs().amax(-1, keepdim=True)
    groups = F.pad(x_BTD, (0, -width % _GROUP)).unflatten(-1, (-1, _GROUP))
    share = groups.abs().amax(-1) / torch.where(scale_BT1 == 0, 1.0, scale_BT1)
    # Rounded down: no number is above its group's scale.
    exponents = (-_STEPS * share.clamp_min(1e-30).log2()).floor().clamp(0, 255).nan_to_num()
    of_group = scale_BT1 * torch.exp2(-exponents / _STEPS)
    levels = groups / torch.where(of_group == 0, 1.0, of_group)[..., None] * largest
    # Of two bits the levels are the odd numbers: none is wasted on zero.
    codes = ((levels + largest) / 2).round() if bits == 2 else levels.round() + largest
    codes = codes.nan_to_num().clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(-2)[..., :width]
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))
    packed = sum((parts[..., i] << (bits * i) for i in range(1, per_byte)), start=parts[..., 0])
    return torch.cat([packed, exponents.to(torch.uint8), scale_BT1.view(torch.uint8)], dim=-1)


def _unpacked(values: Tensor, scale_BT1: Tensor, width: int, bits: int, largest: int) -> Tensor:
    groups = -(-width // _GROUP)
    packed, exponents = values.split([values.shape[-1] - groups, groups], dim=-1)
    shifts = torch.arange(0, 8, bits, device=values.device, dtype=torch.uint8)
    codes = ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :width].float()
    levels = (codes * 2 if bits == 2 else codes) - largest
    of_group = scale_BT1 * torch.exp2(exponents.float() / -_STEPS) / largest
    return levels * of_group.repeat_interleave(_GROUP, dim=-1)[..., :width]
