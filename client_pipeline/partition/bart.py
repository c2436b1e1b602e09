"""Hugging Face BART and Marian: ``encoder.layers[i]`` as TEBs, the decoder on the server.

One matrix embeds source and target tokens and is the output layer, too: it lives on the CU. Marian can have one of
its own for the targets; then the server has all of it. Positions belong to encoder and decoder each.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition import hugging_face
from client_pipeline.partition.encoder import mask_form as mask_form
from client_pipeline.partition.hugging_face import LABEL_SMOOTHING, TRAINED_LOGITS_BIAS, config_from_spec, fresh_model
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.partition.seq2seq import Seq2SeqHead
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec
from client_pipeline.quick_imports import quick_import

HEADS = (SEQ2SEQ,)

_TIED = {"decoder.embed_tokens.weight": "embed_tokens.weight"}


def _library(spec: ModelSpec, suffix: str) -> Any:
    """A class of the family's own module, by the end of its name."""
    module = quick_import(f"transformers.models.{spec.family}.modeling_{spec.family}")
    return getattr(module, spec.family.title() + suffix)


def library_config(spec: ModelSpec) -> Any:
    """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
    config = config_from_spec(spec, HEADS)
    if config.encoder_layerdrop:
        raise ValueError(
            f"model.encoder_layerdrop: expected 0, found {config.encoder_layerdrop}: a pipeline runs every TEB"
        )
    return config


def tied(spec: ModelSpec) -> dict[str, str]:
    """The decoder's token embedding, which is the output layer, too."""
    config = library_config(spec)
    shared = config.tie_word_embeddings and (spec.family == "bart" or config.share_encoder_decoder_embeddings)
    return dict(_TIED) if shared else {}


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

    def __init__(self, spec: ModelSpec, decoder: nn.Module, output: nn.Module, bias: Tensor) -> None:
        config = library_config(spec)
        smoothing = spec.config.get(LABEL_SMOOTHING, 0.0)
        super().__init__(config.decoder_start_token_id, config.pad_token_id, smoothing)
        self.decoder = decoder
        self.lm_head = output
        self.tied = tied(spec)
        if spec.config.get(TRAINED_LOGITS_BIAS):
            # Only parameters travel, and Marian's own training has it as one, too.
            self.final_logits_bias = nn.Parameter(bias)
        else:
            self.register_buffer("final_logits_bias", bias)

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]."""
        states = self.decoder(
            input_ids=ids_BU, encoder_hidden_states=memory_BTD, encoder_attention_mask=mask_BT.long(), use_cache=False
        )
        return cast(Tensor, states.last_hidden_state)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return cast(Tensor, self.lm_head(y)) + self.final_logits_bias.squeeze(0)


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return int(library_config(spec).encoder_layers)


def width(spec: ModelSpec) -> int:
    """D."""
    return int(library_config(spec).d_model)


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the source embedding with fresh weights."""
    config = library_config(spec)
    if spec.family == "bart":
        scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        tokens = _library(spec, "ScaledWordEmbedding")(config.vocab_size, config.d_model, config.pad_token_id, scale)
        positions = _library(spec, "LearnedPositionalEmbedding")(config.max_position_embeddings, config.d_model)
        return BartEmbedding(tokens, positions, nn.LayerNorm(config.d_model), config)
    tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
    positions = _library(spec, "SinusoidalPositionalEmbedding")(config.max_position_embeddings, config.d_model)
    with torch.no_grad():
        positions.weight.copy_(positions.create_weight())
    return BartEmbedding(tokens, positions, None, config)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one encoder layer; all are alike."""
    del index
    return cast(nn.Module, _library(spec, "EncoderLayer")(library_config(spec)))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the decoder with fresh weights."""
    config = library_config(spec)
    decoder = _library(spec, "Decoder")(config)
    vocabulary = len(decoder.embed_tokens.weight)
    output = nn.Linear(config.d_model, vocabulary, bias=False)
    if config.tie_word_embeddings:
        output.weight = decoder.embed_tokens.weight
    return BartHead(spec, decoder, output, torch.zeros(1, vocabulary))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``BartForConditionalGeneration`` or ``MarianMTModel``; the parts share its parameters."""
    encoder, decoder, bias = model.model.encoder, model.model.decoder, model.final_logits_bias
    if bool(bias.any()) and not spec.config.get(TRAINED_LOGITS_BIAS):
        raise ValueError(
            f"model.{TRAINED_LOGITS_BIAS}: expected True, as this {spec.family} has a bias of the logits; set it in "
            "the specification"
        )
    if spec.family == "marian":
        for side in (encoder, decoder):
            # Fixed sinusoids, which the library's loading makes trainable.
            side.embed_positions.requires_grad_(False)
    norm = getattr(encoder, "layernorm_embedding", None)
    return ModelParts(
        spec=spec,
        embedding=BartEmbedding(encoder.embed_tokens, encoder.embed_positions, norm, model.config),
        blocks=encoder.layers,
        head=BartHead(spec, decoder, model.lm_head, bias),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)


def spec_from_model(model: Any, head: str) -> ModelSpec:
    """Build the specification of a library model, with what its configuration does not say."""
    return hugging_face.spec_from_model(model, head, **{TRAINED_LOGITS_BIAS: bool(model.final_logits_bias.any())})
