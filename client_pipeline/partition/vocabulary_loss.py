"""The loss over a vocabulary, without all positions' scores at once: the largest tensors of a language model's head.

512 positions over 49,152 tokens are 100 MB of scores, three times with their softmax and gradient. Beyond
:data:`MOST_SCORES` positions are taken a piece at a time, forward and backward together, so that two pieces' worth is
held at most.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST_SCORES = 1 << 22
"""Scores that are computed at once: 16 MB. Half as many would cost a fifth more time."""


def vocabulary_loss(states_ND: Tensor, output: nn.Module, labels_N: Tensor) -> Tensor:
    """Sum of the cross-entropies of each label.

    Parameters
    ----------
    states_ND : what the output layer takes, of N positions with a label
    output : a linear layer without bias, [V, D]
    labels_N : tokens, int64
    """
    weight_VD = cast(Tensor, output.weight)
    if len(labels_N) * len(weight_VD) <= MOST_SCORES or getattr(output, "bias", None) is not None:
        return F.cross_entropy(output(states_ND), labels_N, reduction="sum")
    return cast(Tensor, _PieceByPiece.apply(states_ND, weight_VD, labels_N))  # type: ignore[no-untyped-call]


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
