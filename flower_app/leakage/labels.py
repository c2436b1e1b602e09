"""The attack on labels that stay in the clusters: what the gradients of the server's states say of them.

The server knows its states h and, where the output layer is public or averaged, the tail: closing norm and matrix W.
The gradient that comes back is J^T W^T (p - e_y), with p the scores of h and J the norm's derivative there. All but
e_y can be computed, so the token y follows in closed form: it is the row of W whose share is missing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts, targets
from flower_app.leakage.inversion import TOP, Recovered

_CANDIDATES = 32
"""Tokens of which the exact share is computed, the most like the missing one."""


def label_rows(parts: ModelParts, batch: Batch, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the server has of each position that carries a loss, and the truth.

    Parameters
    ----------
    parts : a model whose tail is the control unit's
    batch : with its labels
    hidden_BTD : activations that the server is sent

    Returns
    -------
    States after its blocks, gradients of the positions' own losses by them, both [N, D], and labels [N].
    """
    mask_BT, tail = batch["attention_mask"], cast(nn.Module, parts.embedding.tail)
    with torch.enable_grad():
        states_BTD = parts.head_on_server(hidden_BTD, mask_BT).detach().requires_grad_()
        (gradient_BTD,) = torch.autograd.grad(tail(states_BTD, mask_BT, targets(batch)), states_BTD)
    # The label of a position is the next one's token.
    labels_BT = targets(batch)["labels"][:, 1:]
    real = labels_BT != IGNORED_LABEL
    return states_BTD.detach()[:, :-1][real], gradient_BTD[:, :-1][real], labels_BT[real]


def read_labels(tail: nn.Module, states_ND: Tensor, gradient_ND: Tensor, labels_N: Tensor) -> Recovered:
    """Name the labels of tokens by their gradients.

    Parameters
    ----------
    tail : ``norm``, ``lm_head`` and ``scores``, as the attacker knows them
    states_ND : of N positions, before the norm
    gradient_ND : of each position's own loss by its states, as it was sent
    labels_N : the truth, to count right guesses
    """
    lengths_V = cast(Any, tail).lm_head.weight.detach().norm(dim=1).clamp_min(1e-8)
    guesses = [_guesses(cast(Any, tail), lengths_V, *pair) for pair in zip(states_ND, gradient_ND, strict=True)]
    return Recovered.of(torch.stack(guesses), labels_N)


def _guesses(tail: Any, lengths_V: Tensor, state_D: Tensor, gradient_D: Tensor) -> Tensor:
    """Return the five likeliest labels of a position; ``lengths_V`` are those of the matrix's rows."""
    matrix_VD = tail.lm_head.weight.detach()
    state_D = state_D.detach().requires_grad_()

    def norm(x_D: Tensor) -> Tensor:
        return cast(Tensor, tail.norm(x_D[None, None])[0, 0])

    with torch.enable_grad():
        scores_V = tail.scores(norm(state_D)[None, None])[0, 0]
        p_V = scores_V.detach().softmax(dim=0)
        (expected_D,) = torch.autograd.grad(scores_V, state_D, p_V, retain_graph=True)
        # A gradient that was clipped has a length of its own: what is missing of it is known but for what lies along
        # the expected. Both are looked for.
        along = (gradient_D @ expected_D) / expected_D.square().sum().clamp_min(1e-30)
        missing = (expected_D - gradient_D, along * expected_D - gradient_D)
        there_2D = torch.stack([cast(Any, torch.func.jvp(norm, (state_D.detach(),), (each,)))[1] for each in missing])
        likeness_2V = there_2D @ matrix_VD.T / lengths_V
        candidates = likeness_2V.topk(min(_CANDIDATES, len(lengths_V)), dim=1).indices.unique()
        # One product for all candidates: each of them alone would go through the whole matrix.
        chosen_CV = F.one_hot(candidates, len(lengths_V)).to(scores_V.dtype)
        (shares_CD,) = torch.autograd.grad(scores_V, state_D, chosen_CV, is_grads_batched=True)
    likeness = F.cosine_similarity(expected_D - shares_CD, gradient_D[None], dim=1)
    return candidates[likeness.argsort(descending=True)][:TOP]
