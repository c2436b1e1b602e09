"""A backward pass from a gradient that came from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ReceivedGradient(torch.autograd.Function):
    """A scalar whose derivative by a tensor is a given one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def backward_from(output: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` of all that ``output`` was computed from, for the loss's gradient by it.

    The same as ``torch.autograd.backward(output, gradient)``, which imports sympy to compare the two shapes: 0.4 s of
    each process's start.

    Parameters
    ----------
    output : of a forward pass
    gradient : of the loss by it, of the same shape

    Raises
    ------
    RuntimeError
        If the shapes differ, or nothing that ``output`` was computed from takes a gradient.
    """
    _ReceivedGradient.apply(output, gradient).backward()  # type: ignore[no-untyped-call]
