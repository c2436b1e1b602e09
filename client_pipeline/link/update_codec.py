"""A control unit's answer in fewer bytes, and the error feedback that makes up for the loss.

Of each tensor of n numbers the change in the round travels, as tensors named ``<global name>/<part>``::

    fp16     values half [n], scale float32 [1]              2n + 4 bytes      x = scale * h, scale = max|x|
    int8     values int8 [n], scale float32 [1]               n + 4 bytes      x = scale * q, scale = max|x| / 127
    int4     packed uint8, a row of activations as int4        n/2 + n/32 + 4 bytes (n even, both rounded up)
    top-k    values float32 [k], index int32 [k], rising         8k bytes      k = max(1, ceil(density * n))

Error feedback (arXiv:1901.09847): u = change + e travels as C(u), and e = u - C(u) waits on the control unit. e
moves on when the server has said that the update counted: of one that failed, or was left out, no part of e is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from client_pipeline.link.activation_codec import FEW_BITS, QUANTIZED, ActivationCodec, quantized
from client_pipeline.link.compression import CompressionConfig


class UpdateError(ValueError):
    """An update is not what the server's codec expects, or not finite; the message names the tensor."""


@dataclass(frozen=True)
class UpdateCodec:
    """Form in which the changes of a round travel: ``fp16``, ``int8``, ``int4`` or ``top-k`` of the configuration."""

    config: CompressionConfig

    def kinds(self, num_elements: int) -> dict[str, tuple[torch.dtype, int]]:
        """Type and length of each part of a tensor."""
        if self.config.update == "top-k":
            kept = max(1, math.ceil(self.config.density * num_elements)) if num_elements else 0
            return {"values": (torch.float32, kept), "index": (torch.int32, kept)}
        if self.config.update in FEW_BITS:
            return {"packed": (torch.uint8, ActivationCodec(self.config.update).row_bytes(_even(num_elements)))}
        return {"values": (QUANTIZED[self.config.update][0], num_elements), "scale": (torch.float32, 1)}

    def encode(self, change: Tensor) -> dict[str, Tensor]:
        """Encode one tensor, by part."""
        flat_change = change.detach().flatten().float()
        kinds = self.kinds(flat_change.numel())
        if "index" in kinds:
            index = flat_change.abs().topk(kinds["index"][1]).indices.sort().values
            return {"values": flat_change[index], "index": index.to(torch.int32)}
        if "packed" in kinds:
            row = F.pad(flat_change, (0, _even(flat_change.numel()) - flat_change.numel()))
            return {"packed": ActivationCodec(self.config.update).encode(row[None, None]).flatten()}
        if not flat_change.numel():
            return {"values": flat_change.to(kinds["values"][0]), "scale": flat_change.new_zeros(1)}
        values, scale = quantized(flat_change, self.config.update)
        return {"values": values, "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """Decode one tensor of float32.

        Raises
        ------
        UpdateError
            If a part is missing, unknown, of another type or length, or not finite; or an index out of range or order.
        """
        size = shape.numel()
        kinds = self.kinds(size)
        received = {part: (value.dtype, *value.shape) for part, value in parts.items()}
        if received != kinds:
            raise UpdateError(f"expected the parts {_listed(kinds)}, found {_listed(received)}")
        if "packed" in kinds:
            values = ActivationCodec(self.config.update).decode(parts["packed"][None, None]).flatten()[:size]
        else:
            values = parts["values"].float() * parts.get("scale", 1.0)
        if not bool(values.isfinite().all()):
            raise UpdateError("NaN or Inf: training diverged on the control unit")
        if "index" not in kinds:
            return values.reshape(shape)
        index = parts["index"].long()
        if size and (int(index[0]) < 0 or int(index[-1]) >= size or not bool((index.diff() > 0).all())):
            raise UpdateError(f"expected rising indices from 0 to {size - 1}")
        return values.new_zeros(size).index_put_((index,), values).reshape(shape)

    def apply(self, start: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the trained weights: what the round began with, and the update.

        Raises
        ------
        UpdateError
            Naming the tensor that is missing, unknown or does not fit.
        """
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in start}
        for key, value in update.items():
            name, _, part = key.rpartition("/")
            if name not in parts:
                raise UpdateError(f"update: {key!r} belongs to no tensor that was sent")
            parts[name][part] = value
        trained = {}
        for name, value in start.items():
            try:
                trained[name] = value + self.decode(parts[name], value.shape)
            except UpdateError as error:
                raise UpdateError(f"update of {name} ({self.config.update}): {error}") from None
        return trained


def _even(num_elements: int) -> int:
    """Return the length of a row that packs two numbers in a byte; there is one byte at least."""
    return max(2, num_elements + num_elements % 2)


def _listed(kinds: Mapping[str, tuple[object, ...]]) -> str:
    return ", ".join(f"{part} {dtype} {list(shape)}" for part, (dtype, *shape) in sorted(kinds.items())) or "none"


class ErrorFeedback:
    """A control unit's end: compresses its updates, and keeps what was lost for the next one."""

    def __init__(self, codec: UpdateCodec) -> None:
        self.codec = codec
        self.residual: dict[str, Tensor] = {}
        """e, by global name; absent: zero. A checkpoint keeps it."""
        self.pending: dict[str, Tensor] = {}
        """Next value of e if the update of ``pending_round`` counts. A checkpoint keeps both."""
        self.pending_round = 0

    def restore(self, residual: dict[str, Tensor], pending: dict[str, Tensor], pending_round: int) -> None:
        """Go on from what a checkpoint kept."""
        self.residual, self.pending, self.pending_round = residual, pending, pending_round

    def settle(self, counted: int) -> None:
        """Take over what waits since the last update if that was of the round that ``counted``; else forget it."""
        if self.pending_round and self.pending_round == counted:
            self.residual = self.pending
        self.pending, self.pending_round = {}, 0

    def compress(
        self, start: Mapping[str, Tensor], trained: Mapping[str, Tensor], round_: int = 0
    ) -> dict[str, Tensor]:
        """Return what travels of a round.

        Parameters
        ----------
        start : the round's global weights
        trained : the same tensors after it
        round_ : its number, for :meth:`settle`; 0: of a round that nobody confirms

        Raises
        ------
        RuntimeError
            If a weight is not finite; the residual stays as it was.
        """
        update: dict[str, Tensor] = {}
        residual: dict[str, Tensor] = {}
        for name, value in trained.items():
            change = value - start[name].to(value.dtype)
            if name in self.residual:
                change = change + self.residual[name]
            if not bool(change.isfinite().all()):
                raise RuntimeError(f"{name} holds NaN or Inf: training diverged; lower optimizer.lr")
            parts = self.codec.encode(change)
            residual[name] = change - self.codec.decode(parts, change.shape)
            update |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
        self.pending, self.pending_round = residual, round_
        return update


def update_codec(config: CompressionConfig) -> UpdateCodec | None:
    """Return the codec of the updates; None: the trained weights travel as they are."""
    return None if config.update == "none" else UpdateCodec(config)


def update_bytes(config: CompressionConfig, num_elements: int) -> int:
    """Bytes of what travels of one float32 tensor: of its parts, without names and framing."""
    codec = update_codec(config)
    if codec is None:
        return torch.float32.itemsize * num_elements
    return sum(dtype.itemsize * length for dtype, length in codec.kinds(num_elements).values())
