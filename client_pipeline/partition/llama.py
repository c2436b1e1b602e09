"""Hugging Face LLaMA, Mistral, Qwen2 and Qwen3: embeddings on the CU, the first layers as TEBs, the rest on the server.

Rotary embeddings have no parameters: each stage computes them for the positions 0 .. T-1.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.causal import (
    HEADS as HEADS,
    CausalHead,
    causal_mask,
    library_config as library_config,
    mask_form as mask_form,
    num_blocks as num_blocks,
    slice_mask,
    width as width,
)
from client_pipeline.partition.hugging_face import fresh_model, spec_from_model as spec_from_model
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.partition.token_slices import TokenSlice
from client_pipeline.quick_imports import quick_import

_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _library(spec: ModelSpec, suffix: str) -> Any:
    """A class of the family's own module, by the end of its name."""
    module = quick_import(f"transformers.models.{spec.family}.modeling_{spec.family}")
    return getattr(module, _PREFIXES[spec.family] + suffix)


def _window(config: Any, index: int) -> int | None:
    """How many positions a layer's attention sees; None: all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return None
    return cast("int | None", getattr(config, "sliding_window", None))


def tied(spec: ModelSpec) -> dict[str, str]:
    """The output layer, where the model ties it."""
    return {"lm_head.weight": "embed_tokens.weight"} if library_config(spec).tie_word_embeddings else {}


class LlamaEmbedding(nn.Module):
    """The token embedding."""

    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = tokens

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D]."""
        return cast(Tensor, self.embed_tokens(batch["input_ids"]))


class LlamaBlock(nn.Module):
    """One decoder layer with the rotary embeddings that it needs."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, window: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.window = window

    def forward(self, x_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Apply the layer, [B, T, D]; of a slice to its tokens alone."""
        part = mask if isinstance(mask, TokenSlice) else None
        length = x_BTD.shape[1] if part is None else part.length
        positions = torch.arange(length, device=x_BTD.device)[None]
        rotated = self.rotary(x_BTD, positions)
        if part is not None:
            # Some rotary embeddings depend on the length of the sequence: a slice has its part of the whole one's.
            slice_rotations = tuple(of[:, part.first : part.end].clone() for of in rotated)
            near = slice_mask(part, self.window)
            return cast(
                Tensor,
                self.layer(x_BTD, attention_mask=near, position_embeddings=slice_rotations, past_key_values=part),
            )
        if self.window is not None and length > self.window:
            near = causal_mask(length, x_BTD.device, self.window)
            mask = near if mask is None else mask & near
        return cast(Tensor, self.layer(x_BTD, attention_mask=mask, position_embeddings=rotated))


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the token embedding with fresh weights."""
    config = library_config(spec)
    return LlamaEmbedding(nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build layer ``index``."""
    config = library_config(spec)
    rotary = _library(spec, "RotaryEmbedding")(config=config)
    return LlamaBlock(_library(spec, "DecoderLayer")(config, index), rotary, _window(config, index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the server's layers, norm and output layer with fresh weights."""
    config = library_config(spec)
    blocks = [build_block(spec, i) for i in range(num_blocks(spec), config.num_hidden_layers)]
    norm = _library(spec, "RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
    output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return CausalHead(nn.ModuleList(blocks), norm, output, tied(spec))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``...ForCausalLM``; the parts share its parameters."""
    body, config = model.model, model.config
    blocks = [LlamaBlock(layer, body.rotary_emb, _window(config, i)) for i, layer in enumerate(body.layers)]
    cut = num_blocks(spec)
    return ModelParts(
        spec=spec,
        embedding=LlamaEmbedding(body.embed_tokens),
        blocks=nn.ModuleList(blocks[:cut]),
        head=CausalHead(nn.ModuleList(blocks[cut:]), body.norm, model.lm_head, tied(spec)),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
