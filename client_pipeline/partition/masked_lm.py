"""The head of masked-language modelling, over the library's own prediction layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import IGNORED_LABEL


class MaskedLMHead(nn.Module):
    """Transformation, and ``decoder``, the output layer over the vocabulary.

    Parameters
    ----------
    predictions : both, as the library has them: ``predictions.decoder`` is the output layer
    tied : as in :func:`client_pipeline.partition.parts.tied_names`; the weight of the output layer is in most models
        that of the word embeddings
    """

    def __init__(self, predictions: nn.Module, tied: dict[str, str]) -> None:
        super().__init__()
        self.predictions = predictions
        self.tied = tied

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Scores over the vocabulary [B, T, V], or [N, V] for N positions."""
        del mask_BT
        return cast(Tensor, self.predictions(hidden_BTD))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the masked tokens."""
        del mask_BT
        # Only positions with a loss, few of them, reach the output layer.
        masked = targets["labels"] != IGNORED_LABEL
        return F.cross_entropy(self.logits(hidden_BTD[masked]), targets["labels"][masked], reduction="sum")


def in_turn(*layers: nn.Module, decoder: nn.Module) -> nn.Sequential:
    """Put prediction layers that the library keeps apart into one module, ``decoder`` last."""
    return nn.Sequential(OrderedDict([*((str(i), layer) for i, layer in enumerate(layers)), ("decoder", decoder)]))


def with_one_bias(predictions: nn.Module) -> nn.Module:
    """Make ``bias`` and ``decoder.bias`` of a fresh prediction head one parameter, as the library does in a model."""
    predictions.decoder.bias = predictions.bias  # type: ignore[union-attr]
    return predictions
