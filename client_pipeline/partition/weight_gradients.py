"""Weight gradients of linear layers, which make nearly all of a Transformer's: added in place, or when there is time.

While one of these modes is entered, a product with a trained matrix is recorded as one whose backward pass gives its
input's gradient, and hands the factors of the weight's gradient over. :class:`AddedInPlace` multiplies them at once,
into the gradient that is there: autograd would write each micro-batch's to memory, read it again and add it, which for
micro-batches of a few hundred tokens takes a fifth of the product's time, and more where cores share the memory's
bandwidth. :class:`WaitingWeights` puts them aside, for a schedule that asks for them later; everything else of the
graph is freed by the backward pass. What is no linear layer (norms, positions) gets its gradient as always; so does a
matrix that is no parameter itself.

``torch.distributed.pipelining`` cuts a backward pass as well (``stage_backward_input``). It is not used: it is private
to torch, its import costs each device a second of processor time and 78 MB, and it keeps the graph of all layers until
the weights' turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

IN_PLACE_FROM = 2**17
"""Elements of the smallest matrix whose gradient is added in place: with smaller ones it saves nothing."""


class _Factors(NamedTuple):
    """Factors of the gradients of a matrix and its bias."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    """True if the matrix is [in, out], as in GPT-2."""
    x: Tensor
    """[..., in]."""
    gradient: Tensor
    """Gradient of the product, [..., out]."""

    def add(self) -> None:
        """Add to the parameters' gradients."""
        x, gradient = (t.reshape(-1, t.shape[-1]) for t in (self.x.to(self.gradient.dtype), self.gradient))
        left, right = (x, gradient) if self.transposed else (gradient, x)
        _add_product(self.weight, left.t(), right)
        if self.bias is not None:
            _add_gradient(self.bias, gradient.sum(0))


def _add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a parameter's gradient: in one pass through it, if it has the product's type."""
    if parameter.grad is not None and parameter.grad.dtype == left.dtype:
        parameter.grad.addmm_(left, right)
    else:
        _add_gradient(parameter, left @ right)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _RecordedProducts(TorchFunctionMode):
    """Takes the factors of weight gradients where the backward pass would make these."""

    smallest = 0
    """Elements of the smallest matrix whose products are recorded."""

    def take(self, factors: _Factors) -> None:
        """Have the factors of one product's weight gradient, in the backward pass."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record a linear layer's product; call everything else as it is."""
        kwargs = kwargs or {}
        if func is F.linear and (layer := _linear(*args, **kwargs)) and self._is_recorded(*layer):
            return _Product.apply(*layer, False, self.take)  # type: ignore[no-untyped-call]
        # The one way in which the transformers library multiplies by a matrix that is [in, out].
        if func is torch.addmm and len(args) == 3 and not kwargs and self._is_recorded(args[1], args[2], args[0]):
            return _Product.apply(args[1], args[2], args[0], True, self.take)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _is_recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether a product is one with a trained matrix that a backward pass will reach."""
        trained = all(p is None or (p.is_leaf and p.requires_grad) for p in (weight, bias))
        large = weight.numel() >= self.smallest
        return large and trained and x.requires_grad and torch.is_grad_enabled() and (bias is None or bias.dim() == 1)


class AddedInPlace(_RecordedProducts):
    """The weight gradients of large matrices, added as the backward pass comes by.

    Enter it for the forward pass, where :meth:`pays`.
    """

    smallest = IN_PLACE_FROM

    @classmethod
    def pays(cls, parameters: Iterable[Tensor]) -> bool:
        """Return whether there is a matrix that is large enough."""
        return any(parameter.dim() == 2 and parameter.numel() >= cls.smallest for parameter in parameters)

    def take(self, factors: _Factors) -> None:
        """Add to the parameters' gradients."""
        factors.add()


class WaitingWeights(_RecordedProducts):
    """The weight gradients of one micro-batch.

    Enter it for the forward pass; after the backward pass :meth:`add` completes the gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._factors: list[_Factors] = []

    def take(self, factors: _Factors) -> None:
        """Put them aside."""
        self._factors.append(factors)

    @property
    def nbytes(self) -> int:
        """Bytes of what waits, tensors that several layers share counted once."""
        storages = (t.untyped_storage() for factors in self._factors for t in (factors.x, factors.gradient))
        # Not by the address of their data: tensors without data are counted, too.
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def add(self) -> None:
        """Add the gradients that waited to those of the parameters, and let go of what they are made of."""
        for factors in self._factors:
            factors.add()
        self._factors.clear()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Product(torch.autograd.Function):
    """A linear layer whose backward pass gives the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, take: Callable[[_Factors], None]
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves: what is saved for a backward pass comes back as another tensor, of no gradient.
        ctx.weight, ctx.bias, ctx.transposed, ctx.take = weight, bias, transposed, take
        return torch.addmm(bias, x, weight) if transposed and bias is not None else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        ctx.take(_Factors(ctx.weight, ctx.bias, ctx.transposed, x.detach(), gradient))
        matrix = ctx.weight.detach().to(gradient.dtype)
        product = gradient @ (matrix.t() if ctx.transposed else matrix)
        return product.to(x.dtype), None, None, None, None
