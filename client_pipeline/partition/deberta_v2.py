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

from client_pipeline.partition import encoder
from client_pipeline.partition.encoder import HEADS as HEADS, ClassifierHead, linear_classifier, tied as tied
from client_pipeline.partition.hugging_face import (
    fresh_model,
    spec_from_config as spec_from_config,
    spec_from_model as spec_from_model,
)
from client_pipeline.partition.masked_lm import MaskedLMHead, with_one_bias
from client_pipeline.partition.parts import Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


def library_config(spec: ModelSpec) -> Any:
    """Build the library's configuration of a specification.

    Raises
    ------
    ValueError
        For what would be a parameter that nothing uses.
    """
    config = encoder.library_config(spec, attention="eager")
    if not config.relative_attention and _has_norm(config):
        raise ValueError(
            "norm_rel_ebd: expected none without relative_attention, found layer_norm, which would have no effect; "
            "leave norm_rel_ebd out"
        )
    if spec.head == MASKED_LM and not config.legacy:
        raise ValueError("legacy: expected true for the head masked-lm of family deberta-v2, found false; set it")
    return config


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
    """Where in the table the offsets are that :class:`RelativePositions` gives, [2, T]."""
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


def carried_examples(spec: ModelSpec) -> int:
    """See :func:`client_pipeline.partition.families.carried_examples`."""
    return carried_examples_of(library_config(spec))


def _masks(mask_BT: Tensor) -> DebertaMasks:
    return DebertaMasks(mask_BT[:, None, None, :] & mask_BT[:, None, :, None], mask_BT.long())


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Build what layers and convolution take."""
    del dtype
    return _masks(mask_BT)


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return int(library_config(spec).num_hidden_layers)


def width(spec: ModelSpec) -> int:
    """D."""
    return int(library_config(spec).hidden_size)


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Embeddings

    config = library_config(spec)
    relative = None
    if config.relative_attention:
        table = nn.Embedding(2 * _span(config), config.hidden_size)
        norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if _has_norm(config) else None
        relative = RelativePositions(table, norm, config)
    return DebertaV2Embedding(DebertaV2Embeddings(config), relative)


def _has_norm(config: Any) -> bool:
    return "layer_norm" in str(getattr(config, "norm_rel_ebd", "none"))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``DebertaV2Layer``, with the convolution if it is the first and the model has one."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import ConvLayer, DebertaV2Layer

    config = library_config(spec)
    has_conv = index == 0 and getattr(config, "conv_kernel_size", 0) > 0
    last = index == config.num_hidden_layers - 1
    return DebertaV2Block(DebertaV2Layer(config), ConvLayer(config) if has_conv else None, config, last)


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import ContextPooler, LegacyDebertaV2LMPredictionHead

    config = library_config(spec)
    if spec.head == MASKED_LM:
        return MaskedLMHead(with_one_bias(LegacyDebertaV2LMPredictionHead(config)), tied(spec))
    if spec.head != SEQUENCE_CLASSIFICATION:
        return ClassifierHead(spec, None, nn.Dropout(config.hidden_dropout_prob), linear_classifier(config))
    rate = getattr(config, "cls_dropout", None)
    dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)
    return ClassifierHead(spec, ContextPooler(config), dropout, linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
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
        head = MaskedLMHead(model.cls.predictions, tied(spec))
    else:
        pooler = model.pooler if spec.head == SEQUENCE_CLASSIFICATION else None
        head = ClassifierHead(spec, pooler, model.dropout, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=DebertaV2Embedding(model.deberta.embeddings, relative),
        blocks=nn.ModuleList(blocks),
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
