"""A model family as somebody else would add it: one class, in a file that this repository does not know."""

import torch.nn.functional as F
from torch import nn

from client_pipeline.families.encoder import ClassifierHead
from client_pipeline.families.family import Family
from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, ModelSpec


class Convolutions(Family):
    """An encoder without attention: each TEB is a convolution over neighbouring words."""

    HEADS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)

    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Words have no positions: convolutions see who stands beside whom."""
        return Words(spec.config["vocab_size"], spec.config["width"], padding_idx=spec.config["pad_id"])

    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """All are alike."""
        return Neighbours(self.width(spec))

    def build_head(self, spec: ModelSpec) -> nn.Module:
        """A linear layer on the first word, or on each."""
        pooler = FirstWord() if spec.head == SEQUENCE_CLASSIFICATION else None
        return ClassifierHead(spec, pooler, None, nn.Linear(self.width(spec), spec.config["num_labels"]))


class Words(nn.Embedding):
    def forward(self, batch):
        return super().forward(batch["input_ids"])


class Neighbours(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, width, kernel_size=5, padding=2)

    def forward(self, x_BTD, mask):
        h = self.norm(x_BTD)
        if mask is not None:
            h = h * mask[:, 0, 0, :, None]
        return x_BTD + F.gelu(self.convolution(h.transpose(1, 2))).transpose(1, 2)


class FirstWord(nn.Module):
    def forward(self, hidden_BTD):
        return hidden_BTD[:, 0]
