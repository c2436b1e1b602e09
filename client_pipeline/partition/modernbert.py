"""Hugging Face ModernBERT: rotary positions, and layers that attend to all tokens or to their neighbours.

Always the padded path, with sdpa. What a layer needs beside its input (rotary tables, the mask of its window) it
builds from the padding mask that travels; the norm that closes the encoder belongs to the server's side.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.encoder import (
    HEADS as HEADS,
    ClassifierHead,
    EncoderEmbedding,
    library_config as library_config,
    linear_classifier,
    mask_form as global_mask,
    num_blocks as num_blocks,
    tied as tied_to,
    width as width,
)
from client_pipeline.partition.hugging_face import (
    fresh_model,
    spec_from_config as spec_from_config,
    spec_from_model as spec_from_model,
)
from client_pipeline.partition.masked_lm import MaskedLMHead, in_turn
from client_pipeline.partition.parts import MaskForm, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec

_INPUTS = ("input_ids",)


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

    def __init__(
        self, spec: ModelSpec, final_norm: nn.Module, head: nn.Module, dropout: nn.Module, classifier: nn.Module
    ) -> None:
        super().__init__(spec, head, dropout, classifier)
        config = library_config(spec)
        self.pooling = config.classifier_pooling if spec.head == SEQUENCE_CLASSIFICATION else None
        self.final_norm = final_norm

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Class scores: [B, classes] of sequences, [B, T, classes] of tokens."""
        hidden = self.final_norm(hidden_BTD)
        if self.pooling == "cls":
            hidden = hidden[:, 0]
        elif self.pooling == "mean":
            hidden = (hidden * mask_BT.unsqueeze(-1)).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)
        return super().logits(hidden, mask_BT)


def tied(spec: ModelSpec) -> dict[str, str]:
    """Output layer of masked-language modelling, unless the model unties it."""
    return tied_to(spec, "embeddings.tok_embeddings.weight")


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Build what both kinds of layers take."""
    return LocalAndGlobalMasks(mask_BT, global_mask(mask_BT, dtype))


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.modernbert.modeling_modernbert import ModernBertEmbeddings

    return EncoderEmbedding(ModernBertEmbeddings(library_config(spec)), _INPUTS)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one layer; its index decides how far it attends, and the first has no norm before its attention."""
    from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer, ModernBertRotaryEmbedding

    config = library_config(spec)
    return ModernBertBlock(ModernBertEncoderLayer(config, layer_idx=index), ModernBertRotaryEmbedding(config), config)


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.modernbert.modeling_modernbert import ModernBertPredictionHead

    config = library_config(spec)
    final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
    head = ModernBertPredictionHead(config)
    if spec.head == MASKED_LM:
        decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=config.decoder_bias)
        return MaskedLMHead(in_turn(final_norm, head, decoder=decoder), tied(spec))
    return ModernBertHead(spec, final_norm, head, nn.Dropout(config.classifier_dropout), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``ModernBertFor...`` of one of the heads; the parts share its parameters."""
    encoder, config = model.model, model.config
    head: nn.Module
    if spec.head == MASKED_LM:
        head = MaskedLMHead(in_turn(encoder.final_norm, model.head, decoder=model.decoder), tied(spec))
    else:
        head = ModernBertHead(spec, encoder.final_norm, model.head, model.drop, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(encoder.embeddings, _INPUTS),
        blocks=nn.ModuleList([ModernBertBlock(layer, encoder.rotary_emb, config) for layer in encoder.layers]),
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
