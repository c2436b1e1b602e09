"""The head of masked-language modelling, over the library's own prediction layers."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import IGNORED_LABEL


class MaskedLMHead(nn.Module):
    """Transformation and output layer over the vocabulary, whose weight is that of the word embeddings."""

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
