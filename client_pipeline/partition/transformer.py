"""The classic encoder-decoder Transformer (Vaswani et al., 2017), pre- or post-norm, ready to be split.

With pre-norm the norm that closes the encoder belongs to the decoder's side: it is one small layer, and the
blocks stay alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import Batch, MaskForm, ModelParts
from client_pipeline.partition.seq2seq import Seq2SeqHead
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec

HEADS = (SEQ2SEQ,)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a classic Transformer."""

    vocab_size: int
    """Tokens of the joint vocabulary."""
    width: int = 128
    """D."""
    num_heads: int = 4
    feed_forward: int = 512
    """Inner width of the feed-forward layers."""
    encoder_layers: int = 4
    """L, the TEBs."""
    decoder_layers: int = 4
    dropout: float = 0.1
    norm: str = "pre"
    """``pre`` or ``post``."""
    max_length: int = 256
    """Longest sequence, source or target."""
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        for name in (
            "vocab_size",
            "width",
            "num_heads",
            "feed_forward",
            "encoder_layers",
            "decoder_layers",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name.replace('_', '-')}: expected at least 1, found {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width: {self.width} is not a multiple of model.num-heads = {self.num_heads}; change one of them"
            )
        if self.norm not in ("pre", "post"):
            raise ValueError(f"model.norm: expected pre or post, found {self.norm!r}")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name.replace('_', '-')}: expected a number in [0, 1), found {getattr(self, name)}"
                )


def _config(spec: ModelSpec) -> TransformerConfig:
    return TransformerConfig(**spec.config)


def _positions(length: int, width: int) -> Tensor:
    """Sinusoidal position encodings [length, width]."""
    position = torch.arange(length).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : width // 2]
    return table


class TokenEmbedding(nn.Module):
    """Scaled token embedding plus sinusoidal positions, then dropout."""

    positions: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width, padding_idx=config.pad_id)
        nn.init.normal_(self.token.weight, std=config.width**-0.5)
        with torch.no_grad():
            self.token.weight[config.pad_id].zero_()
        self.scale = math.sqrt(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", _positions(config.max_length, config.width), persistent=False)

    def embed(self, ids_BT: Tensor, offset: int = 0) -> Tensor:
        """Embed ids that start at position ``offset``, [B, T, D]."""
        length = offset + ids_BT.shape[1]
        if length > len(self.positions):
            raise ValueError(
                f"a sequence of {length} tokens exceeds model.max-length = {len(self.positions)}; "
                "raise model.max-length or lower data.max-length"
            )
        return self.dropout(self.token(ids_BT) * self.scale + self.positions[offset:length])


class SourceEmbedding(TokenEmbedding):
    """The control unit's part."""

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D]."""
        return self.embed(batch["input_ids"])


class Attention(nn.Module):
    """Multi-head attention over ``memory`` (self-attention when it is x)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.output = nn.Linear(config.width, config.width)
        for linear in (self.query, self.key_value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor, mask: MaskForm, causal: bool = False) -> Tensor:
        """Attend from x to memory; ``mask`` is bool, broadcast to [B, heads, T, S], True where attention is allowed."""
        key, value = self.key_value(memory_BSD).chunk(2, dim=-1)
        attended = F.scaled_dot_product_attention(
            self._heads(self.query(x_BTD)),
            self._heads(key),
            self._heads(value),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Two linear layers with a ReLU between."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            nn.Linear(config.width, config.feed_forward),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.feed_forward, config.width),
        )
        for layer in (self[0], self[3]):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class EncoderBlock(nn.Module):
    """One TEB."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Apply self-attention and feed-forward, [B, T, D]."""
        if self.pre_norm:
            h = self.attention_norm(x_BTD)
            x_BTD = x_BTD + self.dropout(self.attention(h, h, mask))
            return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, x_BTD, mask)))
        return self.feed_forward_norm(x_BTD + self.dropout(self.feed_forward(x_BTD)))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder, feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention = Attention(config)
        self.cross_attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.cross_attention_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, y_BUD: Tensor, memory_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Decode all target positions at once, [B, U, D]."""
        if self.pre_norm:
            h = self.attention_norm(y_BUD)
            y_BUD = y_BUD + self.dropout(self.attention(h, h, None, causal=True))
            h = self.cross_attention_norm(y_BUD)
            y_BUD = y_BUD + self.dropout(self.cross_attention(h, memory_BTD, mask))
            return y_BUD + self.dropout(self.feed_forward(self.feed_forward_norm(y_BUD)))
        y_BUD = self.attention_norm(y_BUD + self.dropout(self.attention(y_BUD, y_BUD, None, causal=True)))
        y_BUD = self.cross_attention_norm(y_BUD + self.dropout(self.cross_attention(y_BUD, memory_BTD, mask)))
        return self.feed_forward_norm(y_BUD + self.dropout(self.feed_forward(y_BUD)))


class TransformerDecoder(Seq2SeqHead):
    """The server's part: decoder blocks, and an output layer tied to the target embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.bos_id, config.pad_id, config.label_smoothing)
        self.config = config
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleList([DecoderBlock(config) for _ in range(config.decoder_layers)])
        pre = config.norm == "pre"
        self.memory_norm = nn.LayerNorm(config.width) if pre else nn.Identity()
        self.norm = nn.LayerNorm(config.width) if pre else nn.Identity()
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def memory(self, memory_BTD: Tensor) -> Tensor:
        """What the decoder attends to, [B, T, D]: the encoder's output, normalised where blocks begin with a norm."""
        normalised: Tensor = self.memory_norm(memory_BTD)
        return normalised

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]; raw encoder output goes in."""
        memory_BTD = self.memory(memory_BTD)
        mask = mask_form(mask_BT, memory_BTD.dtype)
        y_BUD = self.embedding.embed(ids_BU)
        for block in self.blocks:
            y_BUD = block(y_BUD, memory_BTD, mask)
        return self.norm(y_BUD)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return F.linear(y, self.embedding.token.weight, self.output_bias)


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Bool mask [B, 1, 1, T] for scaled_dot_product_attention; None when nothing is padded."""
    del dtype
    return None if bool(mask_BT.all()) else mask_BT[:, None, None, :]


def tied(spec: ModelSpec) -> dict[str, str]:
    """Nothing: the output layer is the target embedding, which the server has to itself."""
    del spec
    return {}


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return _config(spec).encoder_layers


def width(spec: ModelSpec) -> int:
    """D."""
    return _config(spec).width


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the source embedding."""
    return SourceEmbedding(_config(spec))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one TEB; all are alike."""
    del index
    return EncoderBlock(_config(spec))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the decoder.

    Raises
    ------
    ValueError
        If the specification asks for another head than ``seq2seq``.
    """
    if spec.head not in HEADS:
        raise ValueError(f"model.family transformer has the head seq2seq, found {spec.head!r}; use family bert")
    return TransformerDecoder(_config(spec))


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    blocks = nn.ModuleList([build_block(spec, i) for i in range(num_blocks(spec))])
    return ModelParts(
        spec=spec, embedding=build_embedding(spec), blocks=blocks, head=build_head(spec), mask_form=mask_form
    )


def spec(**config: Any) -> ModelSpec:
    """Build the specification of a classic Transformer from :class:`TransformerConfig` fields (checked)."""
    checked = TransformerConfig(**config)
    return ModelSpec(family="transformer", head=SEQ2SEQ, config=vars(checked).copy())
