"""Hugging Face DistilBERT: as BERT, without token types; its pooler is ``pre_classifier`` and a ReLU."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from client_pipeline.partition.encoder_classifier import (
    SEQUENCE,
    ClassifierHead,
    EncoderEmbedding,
    fresh_model,
    linear_classifier,
)
from client_pipeline.partition.encoder_classifier import library_config as library_config
from client_pipeline.partition.encoder_classifier import mask_form as mask_form
from client_pipeline.partition.encoder_classifier import num_blocks as num_blocks
from client_pipeline.partition.encoder_classifier import width as width
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import ModelSpec

_INPUTS = ("input_ids",)


class FirstTokenPooler(nn.Module):
    """The first token's state through a linear layer and a ReLU."""

    def __init__(self, pre_classifier: nn.Module) -> None:
        super().__init__()
        self.pre_classifier = pre_classifier

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Pool to [B, D]."""
        return cast(Tensor, self.pre_classifier(hidden_BTD[:, 0])).relu()


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.distilbert.modeling_distilbert import Embeddings

    return EncoderEmbedding(Embeddings(library_config(spec)), _INPUTS)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``TransformerBlock``; all are alike."""
    from transformers.models.distilbert.modeling_distilbert import TransformerBlock

    del index
    return cast(nn.Module, TransformerBlock(library_config(spec)))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    config = library_config(spec)
    if spec.head == SEQUENCE:
        pooler = FirstTokenPooler(nn.Linear(config.dim, config.dim))
        return ClassifierHead(pooler, nn.Dropout(config.seq_classif_dropout), linear_classifier(config))
    return ClassifierHead(None, nn.Dropout(config.dropout), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``DistilBertFor{Sequence,Token}Classification``; the parts share its parameters."""
    pooler = FirstTokenPooler(model.pre_classifier) if spec.head == SEQUENCE else None
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.distilbert.embeddings, _INPUTS),
        blocks=model.distilbert.transformer.layer,
        head=ClassifierHead(pooler, model.dropout, model.classifier),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
