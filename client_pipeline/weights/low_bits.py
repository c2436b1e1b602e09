"""Frozen matrices of TEBs in fewer bits: ``model.base-dtype``. Adapters, norms and biases stay float32.

A matrix is made smaller where it is used, from the model's own files, and the same way everywhere: a split model has
the numbers of the whole one. Products are in the activations' type, with the matrix brought back for each of them,
forward and backward; nothing of it is kept between the two.

* ``bfloat16``: rounded to the nearest; of a file that holds bfloat16, the file's own pages.
* ``int8``: each row by its largest magnitude, in 127 steps on either side of zero.
* ``nf4``: 64 neighbours of a row by their largest magnitude, and each as the nearest of 16 values, quantiles of a
  normal distribution (arXiv:2305.14314): 4.5 bits with the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.weights.base_weights import FrozenBase

BLOCK = 64
"""Neighbours that have one scale in nf4."""
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def packed(matrix: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Make a matrix smaller.

    Parameters
    ----------
    matrix : [rows, columns], of any floating-point type
    dtype : one of :data:`client_pipeline.partition.spec.BASE_DTYPES` but the first

    Returns
    -------
    What :func:`unpacked` takes: numbers, and where there are some, scales.
    """
    if dtype == "bfloat16":
        return (matrix.to(torch.bfloat16),)
    values = matrix.float()
    if dtype == "int8":
        scales = values.abs().amax(1, keepdim=True) / 127
        return (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8), scales
    assert dtype == "nf4", dtype
    rows = F.pad(values, (0, -values.shape[1] % BLOCK)).reshape(-1, BLOCK)
    scales = rows.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4_VALUES, device=matrix.device)
    nearest = torch.bucketize(rows / scales.clamp_min(torch.finfo(torch.float32).tiny), (levels[1:] + levels[:-1]) / 2)
    pairs = nearest.to(torch.uint8).reshape(-1, 2)
    return pairs[:, 0] * 16 + pairs[:, 1], scales


def unpacked(tensors: tuple[Tensor, ...], dtype: str, shape: torch.Size, to: torch.dtype = torch.float32) -> Tensor:
    """Bring a matrix back.

    Parameters
    ----------
    tensors, dtype : what :func:`packed` gave, and was asked for
    shape : [rows, columns]
    to : type of the result
    """
    if dtype == "bfloat16":
        return tensors[0].to(to)
    numbers, scales = tensors
    if dtype == "int8":
        return numbers.to(to) * scales.to(to)
    pairs = torch.cartesian_prod(*[torch.tensor(NF4_VALUES, device=numbers.device)] * 2)
    rows = F.embedding(numbers.int(), pairs).reshape(-1, BLOCK) * scales
    return rows.reshape(shape[0], -1)[:, : shape[1]].to(to)


class LowBitLinear(nn.Module):
    """A frozen linear layer whose matrix is in few bits, and not there before :meth:`fill`.

    Parameters
    ----------
    bias : as it was; None: none
    shape : [out, in]
    dtype : as of :func:`packed`
    transposed : the layer that it stands for has its matrix as [in, out]
    """

    weight = None
    """There is no such parameter."""

    def __init__(self, bias: nn.Parameter | None, shape: torch.Size, dtype: str, transposed: bool) -> None:
        super().__init__()
        self.bias = bias
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.transposed = transposed
        self.packed_matrix: tuple[Tensor, ...] = ()
        """Empty: it is not here."""

    def fill(self, matrix: Tensor) -> None:
        """Take the matrix, in the form of the layer that this one stands for."""
        self.packed_matrix = packed(matrix.T if self.transposed else matrix, self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitLinear:
        """Have the matrix go where the layer goes."""
        self.packed_matrix = tuple(fn(tensor) for tensor in self.packed_matrix)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def release(self) -> None:
        """Let go of it."""
        self.packed_matrix = ()

    def rounded(self, matrix: Tensor) -> Tensor:
        """Return what this layer makes of a matrix, in the form of the layer that it stands for."""
        straight = matrix.T if self.transposed else matrix
        found = unpacked(packed(straight, self.dtype), self.dtype, straight.shape)
        return found.T if self.transposed else found

    def matrix(self, to: torch.dtype = torch.float32) -> Tensor:
        """Bring the matrix back, [out, in]."""
        return unpacked(self.packed_matrix, self.dtype, torch.Size((self.out_features, self.in_features)), to)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, [..., out]."""
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x W' with the gradient for x alone; W is brought back in either pass, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LowBitLinear) -> Tensor:
        # Of a server's TEB, the layer may have let go of it by then.
        ctx.packed_matrix, ctx.layer = layer.packed_matrix, layer
        return F.linear(x, layer.matrix(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        shape = torch.Size((ctx.layer.out_features, ctx.layer.in_features))
        return gradient @ unpacked(ctx.packed_matrix, ctx.layer.dtype, shape, gradient.dtype), None


def low_bit_layers(module: nn.Module) -> Iterator[tuple[str, LowBitLinear]]:
    """Layers of a TEB in few bits, by the names of those that they stand for."""
    for name, layer in module.named_modules():
        if isinstance(layer, LowBitLinear):
            yield name.replace(".base_layer", ""), layer


def compress(block: nn.Module, dtype: str) -> nn.Module:
    """Have layers in few bits for the frozen matrices of a TEB, which has its adapters, in place; none is filled."""
    from transformers.pytorch_utils import Conv1D

    for name, layer in list(block.named_modules()):
        if isinstance(layer, nn.Linear | Conv1D) and not layer.weight.requires_grad:
            transposed = isinstance(layer, Conv1D)
            shape = layer.weight.T.shape if transposed else layer.weight.shape
            path, _, leaf = name.rpartition(".")
            small = LowBitLinear(layer.bias, shape, dtype, transposed).train(layer.training)
            setattr(block.get_submodule(path), leaf, small)
    return block


def fill_low_bits(block: nn.Module, base: FrozenBase) -> None:
    """Fill the layers in few bits of a TEB from its frozen weights, by its own names without adapters."""
    for name, layer in low_bit_layers(block):
        layer.fill(base.stored(f"{name}.weight"))


def fill_without_data(block: nn.Module) -> int:
    """Fill the layers in few bits of a TEB on the meta device; returns the bytes that their matrices would take."""
    num_bytes = 0
    for _, layer in low_bit_layers(block):
        shape = (layer.out_features, layer.in_features)
        layer.fill(torch.empty(shape[::-1] if layer.transposed else shape, device="meta"))
        num_bytes += sum(tensor.nbytes for tensor in layer.packed_matrix)
    return num_bytes
