"""Decoders of sequence-to-sequence models: teacher forcing, scores and loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import IGNORED_LABEL


class Seq2SeqHead(nn.Module, ABC):
    """A decoder over the encoder's output, and its output layer."""

    def __init__(self, start_id: int, pad_id: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.start_id = start_id
        """Token that a decoder's input begins with."""
        self.pad_id = pad_id
        self.label_smoothing = label_smoothing

    def memory(self, memory_BTD: Tensor) -> Tensor:
        """Return the states that the decoder attends to, [B, T, D]; ``memory_BTD`` is the last TEB's output."""
        return memory_BTD

    @abstractmethod
    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]; ``memory_BTD`` is what the last TEB gives."""

    @abstractmethod
    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""

    def shift_right(self, labels_BU: Tensor) -> Tensor:
        """Decoder input for teacher forcing: the start token, then the labels but the last."""
        ids = labels_BU.masked_fill(labels_BU == IGNORED_LABEL, self.pad_id)
        start = ids.new_full((len(ids), 1), self.start_id)
        return torch.cat([start, ids[:, :-1]], dim=1)

    def logits(self, memory_BTD: Tensor, mask_BT: Tensor, labels_BU: Tensor) -> Tensor:
        """Scores over the vocabulary at every target position, given the labels before it; [B, U, V]."""
        return self.scores(self.hidden(memory_BTD, mask_BT, self.shift_right(labels_BU)))

    def forward(self, memory_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the (label-smoothed) cross-entropies over the real target tokens."""
        labels_BU = targets["labels"]
        y_BUD = self.hidden(memory_BTD, mask_BT, self.shift_right(labels_BU))
        # Only positions with a loss reach the output layer: it is the largest matrix of a small model.
        real = labels_BU != IGNORED_LABEL
        return F.cross_entropy(
            self.scores(y_BUD[real]), labels_BU[real], reduction="sum", label_smoothing=self.label_smoothing
        )
