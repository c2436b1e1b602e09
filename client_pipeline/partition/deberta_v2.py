"""Hugging Face DeBERTa-v2 and v3 with absolute positions (``relative_attention`` false).

The convolution beside the first layer reads that layer's input and output alone, so it is a part of TEB 0.

Relative attention is refused: its table ``rel_embeddings`` is one parameter that every layer reads. A copy on each
device would be another model after the first step, as no device sees the gradient of the others' layers.
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
        For relative attention, which cannot be cut into blocks that move one by one.
    """
    config = encoder.library_config(spec, attention="eager")
    if config.relative_attention:
        raise ValueError(
            "relative_attention: expected false for family deberta-v2, found true; the table rel_embeddings is one "
            "parameter that all TEBs read, and no device could train it alone. Use a model of absolute positions: "
            "modernbert, roberta, electra, or a DeBERTa-v2 configuration with relative_attention = false"
        )
    if "layer_norm" in str(getattr(config, "norm_rel_ebd", "none")):
        raise ValueError(
            "norm_rel_ebd: expected none without relative_attention, found layer_norm, a norm that nothing would use; "
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


class DebertaV2Embedding(nn.Module):
    """Word and position embeddings; padding is zero."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D]."""
        return cast(
            Tensor,
            self.embeddings(
                input_ids=batch["input_ids"],
                token_type_ids=batch.get("token_type_ids"),
                mask=batch["attention_mask"],
            ),
        )


class DebertaV2Block(nn.Module):
    """One layer, and in TEB 0 the convolution beside it."""

    def __init__(self, layer: nn.Module, conv: nn.Module | None) -> None:
        super().__init__()
        self.layer = layer
        self.conv = conv

    def forward(self, x_BTD: Tensor, masks: DebertaMasks | None) -> Tensor:
        """Apply the layer, [B, T, D]; None: nothing is padded."""
        if masks is None:
            masks = _masks(x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool))
        y_BTD = self.layer(x_BTD, masks.attention_B1TT)[0]
        return cast(Tensor, y_BTD if self.conv is None else self.conv(x_BTD, y_BTD, masks.real_BT))


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

    return DebertaV2Embedding(DebertaV2Embeddings(library_config(spec)))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``DebertaV2Layer``, with the convolution if it is the first and the model has one."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import ConvLayer, DebertaV2Layer

    config = library_config(spec)
    has_conv = index == 0 and getattr(config, "conv_kernel_size", 0) > 0
    return DebertaV2Block(DebertaV2Layer(config), ConvLayer(config) if has_conv else None)


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
    layers, conv = model.deberta.encoder.layer, model.deberta.encoder.conv
    head: nn.Module
    if spec.head == MASKED_LM:
        head = MaskedLMHead(model.cls.predictions, tied(spec))
    else:
        pooler = model.pooler if spec.head == SEQUENCE_CLASSIFICATION else None
        head = ClassifierHead(spec, pooler, model.dropout, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=DebertaV2Embedding(model.deberta.embeddings),
        blocks=nn.ModuleList([DebertaV2Block(layer, None if index else conv) for index, layer in enumerate(layers)]),
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
