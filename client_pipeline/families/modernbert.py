"""Hugging Face ModernBERT: rotary positions, and layers that attend to all tokens or to their neighbours.

Always the padded path, with sdpa. A layer builds its rotary tables and the mask of its window from the padding mask
that travels. The norm that closes the encoder belongs to the server's side.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.families.encoder import (
    ClassifierHead,
    EncoderEmbedding,
    EncoderFamily,
    MaskedLMHead,
    in_turn,
)
from client_pipeline.families.hugging_face import encoder_mask
from client_pipeline.partition.parts import MaskForm, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


class LocalAndGlobalMasks:
    """The masks of one micro-batch: of all tokens, and of each window that a layer asks for, built once."""

    def __init__(self, mask_BT: Tensor, everywhere: Tensor | None) -> None:
        self.mask_BT = mask_BT
        self.everywhere = everywhere
        """Bool [B, 1, T, T]; None when nothing is padded."""
        self._windows: dict[int, Tensor] = {}

    def window(self, reach: int) -> Tensor:
        """Real tokens at most ``reach`` positions away, bool [B, 1, T, T]."""
        if reach not in self._windows:
            position = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
            near_TT = (position[:, None] - position).abs() <= reach
            self._windows[reach] = self.mask_BT[:, None, None, :] & near_TT
        return self._windows[reach]


class ModernBertBlock(nn.Module):
    """One layer with the rotary tables (no parameters) of its kind."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.kind = str(layer.attention_type)
        self.reach: int | None = config.sliding_window if self.kind == "sliding_attention" else None

    def forward(self, x_BTD: Tensor, masks: LocalAndGlobalMasks | None) -> Tensor:
        """Apply the layer, [B, T, D]; None: nothing is padded."""
        if masks is None:
            masks = LocalAndGlobalMasks(x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool), None)
        mask = masks.everywhere if self.reach is None else masks.window(self.reach)
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
        rotation = self.rotary(x_BTD, positions, self.kind)
        return cast(Tensor, self.layer(x_BTD, attention_mask=mask, position_embeddings=rotation))


class ModernBertHead(ClassifierHead):
    """Final norm, pooling (of sequences), prediction head, dropout and classifier."""

    def __init__(self, spec: ModelSpec, model: Any) -> None:
        super().__init__(spec, model.head, model.drop, model.classifier)
        self.pooling = model.config.classifier_pooling if spec.head == SEQUENCE_CLASSIFICATION else None
        self.final_norm = model.model.final_norm

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Class scores: [B, classes] of sequences, [B, T, classes] of tokens."""
        hidden = self.final_norm(hidden_BTD)
        if self.pooling == "cls":
            hidden = hidden[:, 0]
        elif self.pooling == "mean":
            hidden = (hidden * mask_BT.unsqueeze(-1)).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)
        return super().logits(hidden, mask_BT)


class ModernBert(EncoderFamily):
    """ModernBERT."""

    word_embeddings = "embeddings.tok_embeddings.weight"

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Build the masks of both kinds of layers."""
        del dtype
        return LocalAndGlobalMasks(mask_BT, encoder_mask(mask_BT))

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``ModernBertFor...`` of one of the heads; the parts share its parameters."""
        encoder = model.model
        head: nn.Module
        if spec.head == MASKED_LM:
            head = MaskedLMHead(in_turn(encoder.final_norm, model.head, decoder=model.decoder), self.tied(spec))
        else:
            head = ModernBertHead(spec, model)
        blocks = [ModernBertBlock(layer, encoder.rotary_emb, model.config) for layer in encoder.layers]
        return self.joined(model, spec, EncoderEmbedding(encoder.embeddings, ("input_ids",)), blocks, head)
