"""Hugging Face DeBERTa-v2 and v3, with relative attention or without.

The convolution beside the first layer reads that layer's input and output alone, so it is a part of TEB 0.

With relative attention all layers read one table of embeddings of relative positions, and its norm. Both live on the CU
with the embedding, so that every parameter exists once and any layer can be on any device. What the layers need of the
table travels with the activations, as two further examples of each micro-batch: position t of the first carries the row
of offset +t, of the second that of offset -t. Each TEB reads them and hands them on, so their gradient comes back to
the CU as the sum over all layers, by the way of all activation gradients. The last TEB leaves them out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from client_pipeline.families.encoder import ClassifierHead, EncoderFamily, MaskedLMHead
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


class DebertaMasks(NamedTuple):
    """The two forms of the padding mask."""

    attention_B1TT: Tensor
    """Bool: both tokens are real."""
    real_BT: Tensor
    """int64: 1 for a real token."""


class RelativePositions(nn.Module):
    """The table of relative positions, and what all layers need of it for sequences of T tokens."""

    def __init__(self, table: nn.Embedding, norm: nn.Module | None, config: Any) -> None:
        super().__init__()
        self.rel_embeddings = table
        self.norm = norm
        self.config = config

    def forward(self, length: int) -> Tensor:
        """Rows of the offsets 0 to T - 1, and of 0 to -(T - 1); [2, T, D]."""
        rows = self.rel_embeddings(_table_rows(self.config, length, self.rel_embeddings.weight.device))
        return cast(Tensor, rows if self.norm is None else self.norm(rows))


def _span(config: Any) -> int:
    """Rows of the table on either side of offset 0."""
    return int(config.position_buckets if getattr(config, "position_buckets", -1) > 0 else _longest(config))


def _longest(config: Any) -> int:
    """Offset from which on all are alike."""
    longest = int(getattr(config, "max_relative_positions", -1))
    return int(config.max_position_embeddings) if longest < 1 else longest


def _table_rows(config: Any, length: int, device: torch.device) -> Tensor:
    """Return the rows of the offsets in the table, in the order of :class:`RelativePositions`, [2, T]."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    ahead_T = torch.arange(length, device=device)
    offsets_2T = torch.stack([ahead_T, -ahead_T])
    if getattr(config, "position_buckets", -1) > 0:
        offsets_2T = make_log_bucket_position(offsets_2T, config.position_buckets, _longest(config)).long()
    span = _span(config)
    return (offsets_2T + span).clamp(0, 2 * span - 1)


def _table(config: Any, rows_2TD: Tensor) -> Tensor:
    """Put the rows back where they are in the table, [2 span, D]; the others, which nothing reads, are zero."""
    _, length, width = rows_2TD.shape
    places = _table_rows(config, length, rows_2TD.device).flatten()
    number = len(places)
    # Far offsets share a row. It is there several times; the first stands for all, so that runs repeat bit for bit.
    first = places.new_full((2 * _span(config),), number)
    first.scatter_reduce_(0, places, torch.arange(number, device=places.device), "amin")
    return torch.cat([rows_2TD.reshape(number, width), rows_2TD.new_zeros(1, width)])[first]


class DebertaV2Embedding(nn.Module):
    """Word and position embeddings; padding is zero."""

    def __init__(self, embeddings: nn.Module, relative: RelativePositions | None) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.relative = relative

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D], or [B + 2, T, D] with relative attention."""
        x_BTD = cast(
            Tensor,
            self.embeddings(
                input_ids=batch["input_ids"],
                token_type_ids=batch.get("token_type_ids"),
                mask=batch["attention_mask"],
            ),
        )
        return x_BTD if self.relative is None else torch.cat([x_BTD, self.relative(x_BTD.shape[1])])


class DebertaV2Block(nn.Module):
    """One layer, in TEB 0 the convolution beside it, and the relative positions that pass it by."""

    def __init__(self, layer: nn.Module, conv: nn.Module | None, config: Any, last: bool) -> None:
        super().__init__()
        self.layer = layer
        self.conv = conv
        self.config = config
        self.last = last

    def forward(self, x_BTD: Tensor, masks: DebertaMasks | None) -> Tensor:
        """Apply the layer, [B, T, D]; None: nothing is padded.

        With relative attention, [B + 2, T, D]; the last TEB gives [B, T, D].
        """
        number = len(x_BTD) - carried_examples_of(self.config)
        x_BTD, carried = x_BTD[:number], x_BTD[number:]
        if masks is None:
            masks = _masks(x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool))
        table = _table(self.config, carried) if len(carried) else None
        y_BTD = self.layer(x_BTD, masks.attention_B1TT, rel_embeddings=table)[0]
        if self.conv is not None:
            y_BTD = self.conv(x_BTD, y_BTD, masks.real_BT)
        return cast(Tensor, y_BTD if self.last or not len(carried) else torch.cat([y_BTD, carried]))


def carried_examples_of(config: Any) -> int:
    """Return the number of examples that carry relative positions."""
    return 2 if config.relative_attention else 0


def _masks(mask_BT: Tensor) -> DebertaMasks:
    return DebertaMasks(mask_BT[:, None, None, :] & mask_BT[:, None, :, None], mask_BT.long())


def _has_norm(config: Any) -> bool:
    return "layer_norm" in str(getattr(config, "norm_rel_ebd", "none"))


class DebertaV2(EncoderFamily):
    """DeBERTa-v2 and v3."""

    attention = "eager"

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration of a specification.

        Raises
        ------
        ValueError
            Also for a parameter that nothing would use.
        """
        config = super().library_config(spec)
        if not config.relative_attention and _has_norm(config):
            raise ValueError(
                "norm_rel_ebd: expected none without relative_attention, found layer_norm, which would have no effect; "
                "leave norm_rel_ebd out"
            )
        if spec.head == MASKED_LM and not config.legacy:
            raise ValueError("legacy: expected true for the head masked-lm of family deberta-v2, found false; set it")
        return config

    def carried_examples(self, spec: ModelSpec) -> int:
        """Return the number of examples that carry relative positions."""
        return carried_examples_of(self.library_config(spec))

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Build the masks of layers and convolution."""
        del dtype
        return _masks(mask_BT)

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``DebertaV2For...`` of one of the heads; the parts share its parameters."""
        config, body = model.config, model.deberta.encoder
        last = len(body.layer) - 1
        blocks = [
            DebertaV2Block(layer, body.conv if index == 0 else None, config, index == last)
            for index, layer in enumerate(body.layer)
        ]
        relative = None
        if config.relative_attention:
            relative = RelativePositions(body.rel_embeddings, body.LayerNorm if _has_norm(config) else None, config)
        head: nn.Module
        if spec.head == MASKED_LM:
            head = MaskedLMHead(model.cls.predictions, self.tied(spec))
        else:
            pooler = model.pooler if spec.head == SEQUENCE_CLASSIFICATION else None
            head = ClassifierHead(spec, pooler, model.dropout, model.classifier)
        return self.joined(model, spec, DebertaV2Embedding(model.deberta.embeddings, relative), blocks, head)
