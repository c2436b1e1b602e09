"""The loss over a vocabulary, without all positions' scores at once: the largest tensors of a language model's head.

512 positions over 49,152 tokens are 100 MB of scores, three times with their softmax and gradient. Beyond
:data:`MOST_SCORES` positions are taken a piece at a time, forward and backward together, so that two pieces' worth is
held at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST_SCORES = 1 << 22
"""Scores that are computed at once: 16 MB. Half as many would cost a fifth more time."""


def vocabulary_loss(
    states_ND: Tensor, output: nn.Module, labels_N: Tensor, scores: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Sum of the cross-entropies of each label.

    Parameters
    ----------
    states_ND : what the output layer takes, of N positions with a label
    output : a linear layer, [V, D]
    labels_N : tokens, int64
    scores : states [1, N, D] to scores [1, N, V], by the output layer and what the model does beside it; None: nothing
    """
    weight_VD = cast(Tensor, output.weight)
    if len(labels_N) * len(weight_VD) <= MOST_SCORES:
        scores_NV = output(states_ND) if scores is None else scores(states_ND[None])[0]
        return F.cross_entropy(scores_NV, labels_N, reduction="sum")
    if scores is None and getattr(output, "bias", None) is None:
        return cast(Tensor, _PieceByPiece.apply(states_ND, weight_VD, labels_N))  # type: ignore[no-untyped-call]
    through = scores or (lambda states: output(states))
    parameters = [parameter for parameter in output.parameters() if parameter.requires_grad]
    return cast(Tensor, _PieceByPieceThrough.apply(through, len(weight_VD), states_ND, labels_N, *parameters))  # type: ignore[no-untyped-call]


class _PieceByPiece(torch.autograd.Function):
    """Computes the gradients with the loss, while a piece's scores are there; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        states_gradient = torch.empty_like(states_ND) if needs_states else None
        weight_gradient = torch.zeros_like(weight_VD) if needs_weight else None
        loss = torch.zeros((), device=states_ND.device)
        size = max(1, MOST_SCORES // len(weight_VD))
        for start in range(0, len(labels_N), size):
            states, labels = states_ND[start : start + size], labels_N[start : start + size, None]
            # log_softmax in place: one tensor of scores, and one of its exponentials.
            scores = F.linear(states, weight_VD).float()
            scores -= scores.logsumexp(1, keepdim=True)
            loss -= scores.gather(1, labels).sum()
            if not (needs_states or needs_weight):
                continue
            slopes = scores.exp_().scatter_add_(1, labels, scores.new_full(labels.shape, -1.0))
            if states_gradient is not None:
                states_gradient[start : start + size] = slopes.to(weight_VD.dtype) @ weight_VD
            if weight_gradient is not None:
                weight_gradient.addmm_(slopes.T.to(weight_VD.dtype), states.to(weight_VD.dtype))
        ctx.gradients = states_gradient, weight_gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Any) -> Any:
        (slope,) = slopes
        (states_gradient, weight_gradient), ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(slope) for g in (states_gradient, weight_gradient)), None


class _PieceByPieceThrough(torch.autograd.Function):
    """The same where scores are more than a product: each piece's gradients are torch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Callable[[Tensor], Tensor],
        vocabulary: int,
        states_ND: Tensor,
        labels_N: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        needs_states, needs_any = ctx.needs_input_grad[2], any(ctx.needs_input_grad)
        states_gradient = torch.empty_like(states_ND) if needs_states else None
        sums = [torch.zeros_like(parameter) for parameter in parameters] if needs_any else []
        loss = torch.zeros((), device=states_ND.device)
        size = max(1, MOST_SCORES // vocabulary)
        for start in range(0, len(labels_N), size):
            piece = states_ND[start : start + size].detach().requires_grad_(needs_states)
            with torch.set_grad_enabled(needs_any):
                piece_loss = F.cross_entropy(
                    scores(piece[None])[0].float(), labels_N[start : start + size], reduction="sum"
                )
            loss += piece_loss.detach()
            if not needs_any:
                continue
            wanted = ([piece] if needs_states else []) + list(parameters)
            gradients = list(torch.autograd.grad(piece_loss, wanted))
            if states_gradient is not None:
                states_gradient[start : start + size] = gradients.pop(0)
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
        ctx.gradients = states_gradient, sums
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Any) -> Any:
        (slope,) = slopes
        (states_gradient, sums), ctx.gradients = ctx.gradients, None
        of_states = None if states_gradient is None else states_gradient.mul_(slope)
        return None, None, of_states, None, *(gradient.mul_(slope) for gradient in sums)
