"""Hugging Face BART and Marian: ``encoder.layers[i]`` as TEBs, the decoder on the server.

One matrix embeds source and target tokens and is the output layer, too: it lives on the CU. Marian can have one of
its own for the targets; then the server has all of it. Positions belong to encoder and decoder each.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.bert import mask_form
from client_pipeline.partition.hugging_face import check_head, config_values, read_config
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import ModelSpec

__all__ = [
    "build_block",
    "build_embedding",
    "build_head",
    "build_parts",
    "library_config",
    "mask_form",
    "num_blocks",
    "tied",
    "width",
]

_NAMES = {"bart": ("Bart", "BartForConditionalGeneration"), "marian": ("Marian", "MarianMTModel")}
TRAINED_LOGITS_BIAS = "trained_logits_bias"
"""Key of the specification: the bias of the logits is a parameter. The library has it as a buffer, zero in new models."""

_TIED = {"decoder.embed_tokens.weight": "embed_tokens.weight"}


def _library(spec: ModelSpec, suffix: str) -> Any:
    """A class of the family's own module, by the end of its name; the whole model for an empty one."""
    prefix, model = _NAMES[spec.family]
    module = importlib.import_module(f"transformers.models.{spec.family}.modeling_{spec.family}")
    return getattr(module, prefix + suffix if suffix else model)


def library_config(spec: ModelSpec) -> Any:
    """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
    import transformers

    check_head(spec, "seq2seq")
    kind = getattr(transformers, f"{_NAMES[spec.family][0]}Config")
    config = read_config(kind, spec, own=(TRAINED_LOGITS_BIAS,))
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


class SourceEmbedding(nn.Module):
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


class TranslationHead(nn.Module):
    """The library's decoder and output layer."""

    final_logits_bias: Tensor

    def __init__(
        self, decoder: nn.Module, output: nn.Module, bias: Tensor, trained_bias: bool, tied: dict[str, str]
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.lm_head = output
        self.tied = tied
        if trained_bias:
            # Only parameters travel, and Marian's own training has it as one, too.
            self.final_logits_bias = nn.Parameter(bias)
        else:
            self.register_buffer("final_logits_bias", bias)

    @property
    def config(self) -> Any:
        """The library's configuration."""
        return self.decoder.config

    def shift_right(self, labels_BU: Tensor) -> Tensor:
        """Decoder input for teacher forcing: the start token, then the labels but the last."""
        ids = labels_BU.masked_fill(labels_BU == IGNORED_LABEL, self.config.pad_token_id)
        start = ids.new_full((len(ids), 1), self.config.decoder_start_token_id)
        return torch.cat([start, ids[:, :-1]], dim=1)

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]."""
        states = self.decoder(
            input_ids=ids_BU, encoder_hidden_states=memory_BTD, encoder_attention_mask=mask_BT.long(), use_cache=False
        )
        return cast(Tensor, states.last_hidden_state)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return cast(Tensor, self.lm_head(y)) + self.final_logits_bias.squeeze(0)

    def logits(self, memory_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Scores over the vocabulary at every target position, [B, U, V]."""
        return self.scores(self.hidden(memory_BTD, mask_BT, self.shift_right(targets["labels"])))

    def forward(self, memory_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the real target tokens."""
        labels_BU = targets["labels"]
        y_BUD = self.hidden(memory_BTD, mask_BT, self.shift_right(labels_BU))
        # Only positions with a loss reach the output layer.
        real = labels_BU != IGNORED_LABEL
        return F.cross_entropy(self.scores(y_BUD[real]), labels_BU[real], reduction="sum")


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
        return SourceEmbedding(tokens, positions, nn.LayerNorm(config.d_model), config)
    tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
    positions = _library(spec, "SinusoidalPositionalEmbedding")(config.max_position_embeddings, config.d_model)
    with torch.no_grad():
        positions.weight.copy_(positions.create_weight())
    return SourceEmbedding(tokens, positions, None, config)


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
    trained = bool(spec.config.get(TRAINED_LOGITS_BIAS))
    return TranslationHead(decoder, output, torch.zeros(1, vocabulary), trained, tied(spec))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``BartForConditionalGeneration`` or ``MarianMTModel``; the parts share its parameters."""
    encoder, decoder, bias = model.model.encoder, model.model.decoder, model.final_logits_bias
    trained = bool(spec.config.get(TRAINED_LOGITS_BIAS))
    if bool(bias.any()) and not trained:
        raise ValueError(
            f"model.{TRAINED_LOGITS_BIAS}: expected True, as this {spec.family} has a bias of the logits; set it in "
            "the specification"
        )
    norm = getattr(encoder, "layernorm_embedding", None)
    return ModelParts(
        spec=spec,
        embedding=SourceEmbedding(encoder.embed_tokens, encoder.embed_positions, norm, model.config),
        blocks=encoder.layers,
        head=TranslationHead(decoder, model.lm_head, bias, trained, tied(spec)),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(_library(spec, "")(library_config(spec)), spec)


def spec_from_config(config: Any, trained_logits_bias: bool = False) -> ModelSpec:
    """Build a specification from a ``BartConfig`` or ``MarianConfig``."""
    values = {**config_values(config), TRAINED_LOGITS_BIAS: trained_logits_bias}
    return ModelSpec(family=config.model_type, head="seq2seq", config=values)


def spec_from_model(model: Any) -> ModelSpec:
    """Build the specification of a library model, with what its configuration does not say."""
    return spec_from_config(model.config, bool(model.final_logits_bias.any()))
