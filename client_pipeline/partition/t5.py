"""Hugging Face T5: ``encoder.block[i]`` as TEBs, the decoder on the server.

In the library the first encoder block owns the table of relative position biases, and all blocks use it. Here the
table lives on the CU with the embedding, so that every parameter exists once and any block can be on any device. What
the blocks need of it travels with the activations, in 2H extra channels (H heads; 3% of T5-small's width): position t
carries every head's bias for the offsets +t and -t. Each block reads them and hands them on, so their gradient comes
back to the CU as the sum over all blocks, by the way of all activation gradients.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition import hugging_face
from client_pipeline.partition.encoder import mask_form as mask_form
from client_pipeline.partition.hugging_face import LABEL_SMOOTHING, OWN_LM_HEAD, config_from_spec, fresh_model
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts, share_parameters
from client_pipeline.partition.seq2seq import Seq2SeqHead
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec

HEADS = (SEQ2SEQ,)


def library_config(spec: ModelSpec) -> Any:
    """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
    return config_from_spec(spec, HEADS)


def _decoder_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.is_decoder, config.num_layers = True, config.num_decoder_layers
    return config


def tied(spec: ModelSpec) -> dict[str, str]:
    """The decoder's token embedding; unless the model has one of its own, it is the output layer, too."""
    del spec
    return {"decoder.embed_tokens.weight": "embed_tokens.weight"}


class T5Embedding(nn.Module):
    """Token embedding and the table of relative position biases."""

    def __init__(self, tokens: nn.Module, relative_attention_bias: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed_tokens = tokens
        self.relative_attention_bias = relative_attention_bias
        self.dropout = nn.Dropout(config.dropout_rate)
        self.buckets = {
            "num_buckets": config.relative_attention_num_buckets,
            "max_distance": config.relative_attention_max_distance,
        }

    def _bias(self, offsets_T: Tensor) -> Tensor:
        from transformers.models.t5.modeling_t5 import T5Attention

        return cast(
            Tensor, self.relative_attention_bias(T5Attention._relative_position_bucket(offsets_T, **self.buckets))
        )

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``; [B, T, D + 2H]."""
        x_BTD = self.dropout(self.embed_tokens(batch["input_ids"]))
        offsets_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        bias = torch.cat([self._bias(offsets_T), self._bias(-offsets_T)], dim=-1)
        return torch.cat([x_BTD, bias.expand(len(x_BTD), -1, -1)], dim=-1)


def position_bias(channels_TC: Tensor) -> Tensor:
    """Bias of every query and key, [1, H, T, T], from the extra channels [T, 2H] of one example."""
    ahead_TH, behind_TH = channels_TC.chunk(2, dim=-1)
    by_offset = torch.cat([behind_TH[1:].flip(0), ahead_TH])  # offsets -(T-1) .. T-1
    position = torch.arange(len(channels_TC), device=channels_TC.device)
    offset = position[None, :] - position[:, None]  # key - query
    return F.embedding(offset + len(channels_TC) - 1, by_offset).permute(2, 0, 1)[None]


class T5EncoderBlock(nn.Module):
    """One ``T5Block``, and the channels that pass it by."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.width = width

    def forward(self, x_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Apply the block to the first D channels; [B, T, D + 2H]."""
        channels = x_BTD[..., self.width :]
        # All examples carry the same bias.
        y_BTD = self.layer(x_BTD[..., : self.width], mask, position_bias(channels[0]))[0]
        return torch.cat([y_BTD, channels], dim=-1)


class T5Head(Seq2SeqHead):
    """The norm that closes the encoder, the library's decoder, and the output layer."""

    def __init__(self, spec: ModelSpec, memory_norm: nn.Module, decoder: nn.Module, output: nn.Module) -> None:
        config = library_config(spec)
        smoothing = spec.config.get(LABEL_SMOOTHING, 0.0)
        super().__init__(config.decoder_start_token_id, config.pad_token_id, smoothing)
        self.memory_norm = memory_norm
        self.decoder = decoder
        self.lm_head = output
        self.tied = tied(spec)
        self.width = config.d_model
        self.scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        self.dropout = nn.Dropout(config.dropout_rate)

    def memory(self, memory_BTD: Tensor) -> Tensor:
        """What the decoder attends to, [B, T, D]: the encoder's output without the extra channels, normalised."""
        return cast(Tensor, self.dropout(self.memory_norm(memory_BTD[..., : self.width])))

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]."""
        memory = self.memory(memory_BTD)
        states = self.decoder(
            input_ids=ids_BU, encoder_hidden_states=memory, encoder_attention_mask=mask_BT.long(), use_cache=False
        )
        return cast(Tensor, states.last_hidden_state * self.scale)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return cast(Tensor, self.lm_head(y))


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return int(library_config(spec).num_layers)


def width(spec: ModelSpec) -> int:
    """Channels that travel, D + 2H."""
    config = library_config(spec)
    return int(config.d_model + 2 * config.num_heads)


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the token embedding and the table of biases with fresh weights."""
    config = library_config(spec)
    table = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
    return T5Embedding(nn.Embedding(config.vocab_size, config.d_model), table, config)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``T5Block`` without a table of biases; all are alike."""
    from transformers.models.t5.modeling_t5 import T5Block

    config = library_config(spec)
    return T5EncoderBlock(T5Block(config, has_relative_attention_bias=False, layer_idx=index), config.d_model)


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the decoder with fresh weights."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm, T5Stack

    config = library_config(spec)
    decoder = T5Stack(_decoder_config(config))
    output = nn.Linear(config.d_model, config.vocab_size, bias=False)
    if not spec.config.get(OWN_LM_HEAD):
        output.weight = decoder.embed_tokens.weight
    return T5Head(spec, T5LayerNorm(config.d_model, config.layer_norm_epsilon), decoder, output)


def _has_own_lm_head(model: Any) -> bool:
    return model.lm_head.weight is not model.shared.weight


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``T5ForConditionalGeneration``; the parts share its parameters."""
    encoder = model.encoder
    own_output = _has_own_lm_head(model)
    if own_output != bool(spec.config.get(OWN_LM_HEAD)):
        raise ValueError(
            f"model.{OWN_LM_HEAD}: expected {own_output}, as this T5's output layer is; set it in the specification"
        )
    blocks = []
    for index, layer in enumerate(encoder.block):
        block = cast(T5EncoderBlock, build_block(spec, index))
        share_parameters(block.layer, layer)
        blocks.append(block)
    table = encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    return ModelParts(
        spec=spec,
        embedding=T5Embedding(encoder.embed_tokens, table, model.config),
        blocks=nn.ModuleList(blocks),
        head=T5Head(spec, encoder.final_layer_norm, model.decoder, model.lm_head),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    model = fresh_model(spec, library_config(spec))
    if spec.config.get(OWN_LM_HEAD):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return split(model, spec)


def spec_from_model(model: Any, head: str) -> ModelSpec:
    """Build the specification of a library model, with what its configuration does not say."""
    return hugging_face.spec_from_model(model, head, **{OWN_LM_HEAD: _has_own_lm_head(model)})
