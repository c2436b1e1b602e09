"""Hugging Face GPT-2: token and position embeddings on the CU, the first ``h[i]`` as TEBs, the rest on the server."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.causal import (
    HEADS as HEADS,
    CausalHead,
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


def tied(spec: ModelSpec) -> dict[str, str]:
    """The output layer, unless the model unties it."""
    return {"lm_head.weight": "wte.weight"} if library_config(spec).tie_word_embeddings else {}


class GPT2Embedding(nn.Module):
    """Token and position embeddings, and dropout."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, config: Any) -> None:
        super().__init__()
        self.wte = tokens
        self.wpe = positions
        self.dropout = nn.Dropout(config.embd_pdrop)

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D]."""
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)
        return cast(Tensor, self.dropout(self.wte(ids) + self.wpe(positions)))


class GPT2EncoderBlock(nn.Module):
    """One ``GPT2Block``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Apply the block, [B, T, D]; of a slice to its tokens alone."""
        if isinstance(mask, TokenSlice):
            return cast(Tensor, self.layer(x_BTD, past_key_values=mask, attention_mask=slice_mask(mask)))
        return cast(Tensor, self.layer(x_BTD, attention_mask=mask))


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    config = library_config(spec)
    tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    return GPT2Embedding(tokens, nn.Embedding(config.max_position_embeddings, config.hidden_size), config)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build block ``index``."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return GPT2EncoderBlock(GPT2Block(library_config(spec), layer_idx=index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the server's blocks, norm and output layer with fresh weights."""
    config = library_config(spec)
    blocks = [build_block(spec, i) for i in range(num_blocks(spec), config.num_hidden_layers)]
    norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
    output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return CausalHead(nn.ModuleList(blocks), norm, output, tied(spec))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``GPT2LMHeadModel``; the parts share its parameters."""
    body, blocks = model.transformer, [GPT2EncoderBlock(layer) for layer in model.transformer.h]
    cut = num_blocks(spec)
    return ModelParts(
        spec=spec,
        embedding=GPT2Embedding(body.wte, body.wpe, model.config),
        blocks=nn.ModuleList(blocks[:cut]),
        head=CausalHead(nn.ModuleList(blocks[cut:]), body.ln_f, model.lm_head, tied(spec)),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
