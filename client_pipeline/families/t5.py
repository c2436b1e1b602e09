"""Hugging Face T5 and mT5: ``encoder.block[i]`` as TEBs, the decoder on the server.

In the library the first encoder block owns the table of relative position biases, and all blocks use it. Here the
table lives on the CU with the embedding, so that every parameter exists once and any block can be on any device. What
the blocks need of it travels with the activations, in 2H extra channels (H heads; 3% of T5-small's width): position t
carries every head's bias for the offsets +t and -t. Each block reads them and hands them on, so their gradient comes
back to the CU as the sum over all blocks, by the way of all activation gradients.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.families.hugging_face import LABEL_SMOOTHING, OWN_LM_HEAD, LibraryFamily, spec_from_config
from client_pipeline.families.seq2seq import Seq2SeqHead
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec
from client_pipeline.weights.unfilled import NoStorage, adopt


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

    def __init__(self, spec: ModelSpec, model: Any, tied: dict[str, str]) -> None:
        config, smoothing = model.config, spec.config.get(LABEL_SMOOTHING, 0.0)
        super().__init__(config.decoder_start_token_id, config.pad_token_id, smoothing)
        self.memory_norm = model.encoder.final_layer_norm
        self.decoder = model.decoder
        self.lm_head = model.lm_head
        self.tied = tied
        self.width = config.d_model
        # mT5 has no such setting.
        self.scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0
        self.dropout = nn.Dropout(config.dropout_rate)

    def memory(self, memory_BTD: Tensor) -> Tensor:
        """Return the states that the decoder attends to, [B, T, D]: without the extra channels, normalised."""
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


class T5(LibraryFamily):
    """T5 and mT5."""

    HEADS = (SEQ2SEQ,)

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return the decoder's token embedding; unless the model has one of its own, it is the output layer, too."""
        del spec
        return {"decoder.embed_tokens.weight": "embed_tokens.weight"}

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return int(self.library_config(spec).num_layers)

    def width(self, spec: ModelSpec) -> int:
        """Return the number of channels that travel, D + 2H."""
        config = self.library_config(spec)
        return int(config.d_model + 2 * config.num_heads)

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``T5ForConditionalGeneration``; the parts share its parameters."""
        encoder, own_output = model.encoder, _has_own_lm_head(model)
        if own_output != bool(spec.config.get(OWN_LM_HEAD)):
            raise ValueError(
                f"model.{OWN_LM_HEAD}: expected {own_output}, as this T5's output layer is; set it in the specification"
            )
        table = encoder.block[0].layer[0].SelfAttention.relative_attention_bias
        layers = [_without_table(encoder.block[0], model.config), *encoder.block[1:]]
        blocks = [T5EncoderBlock(layer, model.config.d_model) for layer in layers]
        embedding = T5Embedding(encoder.embed_tokens, table, model.config)
        return self.joined(model, spec, embedding, blocks, T5Head(spec, model, self.tied(spec)))

    def spec_from_model(self, model: Any, head: str) -> ModelSpec:
        """Build the specification of a library model, with what its configuration does not say."""
        return spec_from_config(model.config, head, **{OWN_LM_HEAD: _has_own_lm_head(model)})


def _without_table(first: nn.Module, config: Any) -> nn.Module:
    """Return a block with the parameters of the first one but its table of biases."""
    from transformers.models.t5.modeling_t5 import T5Block

    with NoStorage():
        block: nn.Module = T5Block(config, has_relative_attention_bias=False, layer_idx=0)
    adopt(block, dict(first.named_parameters()), "first T5 block")
    return block


def _has_own_lm_head(model: Any) -> bool:
    return model.lm_head.weight is not model.shared.weight
