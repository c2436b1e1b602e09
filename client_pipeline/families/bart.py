"""Hugging Face BART, Marian, Pegasus and Blenderbot: ``encoder.layers[i]`` as TEBs, the decoder on the server.

One matrix embeds source and target tokens and is the output layer, too: it lives on the CU. Marian can have one of
its own for the targets; then the server has all of it. Positions belong to encoder and decoder each.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.families.hugging_face import (
    LABEL_SMOOTHING,
    TRAINED_LOGITS_BIAS,
    LibraryFamily,
    spec_from_config,
)
from client_pipeline.families.seq2seq import Seq2SeqHead
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec


class BartEmbedding(nn.Module):
    """Scaled token embedding and positions, BART's norm, and dropout."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, norm: nn.Module | None, config: Any) -> None:
        super().__init__()
        self.embed_tokens = tokens
        self.embed_positions = positions
        self.layernorm_embedding = norm
        # BART's own embedding scales by itself.
        self.scale = math.sqrt(config.d_model) if config.scale_embedding and norm is None else 1.0
        self.dropout = config.dropout

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D]."""
        ids = batch["input_ids"]
        tokens_BTD = self.embed_tokens(ids) * self.scale
        if self.layernorm_embedding is None:
            x_BTD = tokens_BTD + self.embed_positions(ids.shape)
        else:
            x_BTD = self.layernorm_embedding(tokens_BTD + self.embed_positions(ids))
        return F.dropout(x_BTD, self.dropout, self.training)


class BartHead(Seq2SeqHead):
    """The library's decoder and output layer."""

    final_logits_bias: Tensor

    def __init__(self, spec: ModelSpec, model: Any, tied: dict[str, str]) -> None:
        config, smoothing = model.config, spec.config.get(LABEL_SMOOTHING, 0.0)
        super().__init__(config.decoder_start_token_id, config.pad_token_id, smoothing)
        # BART's encoder has no closing norm, some of its cousins' have one.
        self.memory_norm = getattr(model.model.encoder, "layer_norm", None)
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head
        self.tied = tied
        if spec.config.get(TRAINED_LOGITS_BIAS):
            # Only parameters travel, and Marian's own training has it as one, too.
            self.final_logits_bias = nn.Parameter(model.final_logits_bias)
        else:
            self.register_buffer("final_logits_bias", model.final_logits_bias)

    def memory(self, memory_BTD: Tensor) -> Tensor:
        """Return the states that the decoder attends to, [B, T, D]."""
        return memory_BTD if self.memory_norm is None else cast(Tensor, self.memory_norm(memory_BTD))

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]."""
        memory = self.memory(memory_BTD)
        states = self.decoder(
            input_ids=ids_BU, encoder_hidden_states=memory, encoder_attention_mask=mask_BT.long(), use_cache=False
        )
        return cast(Tensor, states.last_hidden_state)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return cast(Tensor, self.lm_head(y)) + self.final_logits_bias.squeeze(0)


class Bart(LibraryFamily):
    """BART, Marian, Pegasus and Blenderbot."""

    HEADS = (SEQ2SEQ,)

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
        config = super().library_config(spec)
        if config.encoder_layerdrop:
            raise ValueError(
                f"model.encoder_layerdrop: expected 0, found {config.encoder_layerdrop}: a pipeline runs every TEB"
            )
        return config

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return the decoder's token embedding, which is the output layer, too."""
        config = self.library_config(spec)
        # Marian alone has the choice.
        shared = config.tie_word_embeddings and getattr(config, "share_encoder_decoder_embeddings", True)
        return {"decoder.embed_tokens.weight": "embed_tokens.weight"} if shared else {}

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return int(self.library_config(spec).encoder_layers)

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``BartForConditionalGeneration`` or ``MarianMTModel``; the parts share its parameters."""
        encoder, decoder, bias = model.model.encoder, model.model.decoder, model.final_logits_bias
        if bool(bias.any()) and not spec.config.get(TRAINED_LOGITS_BIAS):
            raise ValueError(
                f"model.{TRAINED_LOGITS_BIAS}: expected True, as this {spec.family} has a bias of the logits; set it "
                "in the specification"
            )
        if spec.family in ("marian", "pegasus"):
            for side in (encoder, decoder):
                # Fixed sinusoids, which the library's loading makes trainable.
                side.embed_positions.requires_grad_(False)
        norm = getattr(encoder, "layernorm_embedding", None)
        embedding = BartEmbedding(encoder.embed_tokens, encoder.embed_positions, norm, model.config)
        return self.joined(model, spec, embedding, encoder.layers, BartHead(spec, model, self.tied(spec)))

    def spec_from_model(self, model: Any, head: str) -> ModelSpec:
        """Build the specification of a library model, with what its configuration does not say."""
        return spec_from_config(model.config, head, **{TRAINED_LOGITS_BIAS: bool(model.final_logits_bias.any())})
