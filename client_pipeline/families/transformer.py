"""The classic encoder-decoder Transformer (Vaswani et al., 2017), pre- or post-norm, ready to be split.

With pre-norm the norm that closes the encoder belongs to the decoder's side: it is one small layer, and the
blocks stay alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.families.family import Family
from client_pipeline.families.seq2seq import Seq2SeqHead
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts, padding_mask
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec

KeyStore = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts keys and values of a new position behind those of the earlier ones; returns all."""


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

    def keys_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a memory, each [B, heads, S, D / heads]."""
        key, value = self.key_value(memory_BSD).chunk(2, dim=-1)
        return self._heads(key), self._heads(value)

    def forward(
        self, x_BTD: Tensor, keys_values: tuple[Tensor, Tensor], mask: MaskForm, causal: bool = False
    ) -> Tensor:
        """Attend from x to a memory's keys and values.

        ``mask`` is bool, broadcast to [B, heads, T, S], True where attention is allowed.
        """
        attended = F.scaled_dot_product_attention(
            self._heads(self.query(x_BTD)),
            *keys_values,
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
            x_BTD = x_BTD + self.dropout(self.attention(h, self.attention.keys_values(h), mask))
            return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        attended = self.attention(x_BTD, self.attention.keys_values(x_BTD), mask)
        x_BTD = self.attention_norm(x_BTD + self.dropout(attended))
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

    def forward(
        self, y_BUD: Tensor, memory: tuple[Tensor, Tensor], mask: MaskForm, keep: KeyStore | None = None
    ) -> Tensor:
        """Decode all target positions at once, or with ``keep`` a new one behind earlier ones, [B, U, D].

        ``memory`` has the keys and values of the encoder's output, for the cross-attention.
        """
        if self.pre_norm:
            y_BUD = y_BUD + self.dropout(self._attend_earlier(self.attention_norm(y_BUD), keep))
            h = self.cross_attention_norm(y_BUD)
            y_BUD = y_BUD + self.dropout(self.cross_attention(h, memory, mask))
            return y_BUD + self.dropout(self.feed_forward(self.feed_forward_norm(y_BUD)))
        y_BUD = self.attention_norm(y_BUD + self.dropout(self._attend_earlier(y_BUD, keep)))
        y_BUD = self.cross_attention_norm(y_BUD + self.dropout(self.cross_attention(y_BUD, memory, mask)))
        return self.feed_forward_norm(y_BUD + self.dropout(self.feed_forward(y_BUD)))

    def _attend_earlier(self, h_BUD: Tensor, keep: KeyStore | None) -> Tensor:
        keys_values = self.attention.keys_values(h_BUD)
        if keep is not None:
            keys_values = keep(*keys_values)
        attended: Tensor = self.attention(h_BUD, keys_values, None, causal=keep is None)
        return attended


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
        """Return the states that the decoder attends to, [B, T, D]: normalised where blocks begin with a norm."""
        normalised: Tensor = self.memory_norm(memory_BTD)
        return normalised

    def hidden(self, memory_BTD: Tensor, mask_BT: Tensor, ids_BU: Tensor) -> Tensor:
        """Decoder states for the target prefix ``ids_BU``, [B, U, D]; raw encoder output goes in."""
        memory_BTD = self.memory(memory_BTD)
        mask = padding_mask(mask_BT)
        y_BUD = self.embedding.embed(ids_BU)
        for block in cast(Iterable[DecoderBlock], self.blocks):
            y_BUD = block(y_BUD, block.cross_attention.keys_values(memory_BTD), mask)
        return self.norm(y_BUD)

    def scores(self, y: Tensor) -> Tensor:
        """Scores over the vocabulary for decoder states [..., D]."""
        return F.linear(y, self.embedding.token.weight, self.output_bias)


class Transformer(Family):
    """The classic encoder-decoder Transformer."""

    HEADS = (SEQ2SEQ,)

    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build the source embedding."""
        return SourceEmbedding(_config(spec))

    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build one TEB; all are alike."""
        del index
        return EncoderBlock(_config(spec))

    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build the decoder.

        Raises
        ------
        ValueError
            If the specification asks for another head than ``seq2seq``.
        """
        if spec.head not in self.HEADS:
            raise ValueError(f"model.family transformer has the head seq2seq, found {spec.head!r}; use family bert")
        return TransformerDecoder(_config(spec))

    def build_parts(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model with fresh weights; the TEBs are drawn first."""
        blocks = nn.ModuleList([self.build_block(spec, index) for index in range(self.num_blocks(spec))])
        return ModelParts(
            spec=spec,
            embedding=self.build_embedding(spec),
            blocks=blocks,
            head=self.build_head(spec),
            mask_form=self.mask_form,
        )

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return _config(spec).encoder_layers

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        return _config(spec).width


def spec(**config: Any) -> ModelSpec:
    """Build the specification of a classic Transformer from :class:`TransformerConfig` fields (checked)."""
    checked = TransformerConfig(**config)
    return ModelSpec(family="transformer", head=SEQ2SEQ, config=vars(checked).copy())
