"""Hugging Face BERT: embeddings on the CU, ``encoder.layer[i]`` as TEBs, pooler and classifier on the server."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from client_pipeline.partition.encoder_classifier import (
    SEQUENCE,
    ClassifierHead,
    EncoderEmbedding,
    classifier_dropout,
    fresh_model,
    linear_classifier,
)
from client_pipeline.partition.encoder_classifier import library_config as library_config
from client_pipeline.partition.encoder_classifier import mask_form as mask_form
from client_pipeline.partition.encoder_classifier import num_blocks as num_blocks
from client_pipeline.partition.encoder_classifier import spec_from_config as spec_from_config
from client_pipeline.partition.encoder_classifier import width as width
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import ModelSpec


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.bert.modeling_bert import BertEmbeddings

    return EncoderEmbedding(BertEmbeddings(library_config(spec)))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``BertLayer``."""
    from transformers.models.bert.modeling_bert import BertLayer

    return cast(nn.Module, BertLayer(library_config(spec), layer_idx=index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.bert.modeling_bert import BertPooler

    config = library_config(spec)
    pooler = BertPooler(config) if spec.head == SEQUENCE else None
    return ClassifierHead(pooler, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``BertForSequenceClassification`` or ``BertForTokenClassification``; the parts share its parameters."""
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.bert.embeddings),
        blocks=model.bert.encoder.layer,
        head=ClassifierHead(model.bert.pooler, model.dropout, model.classifier),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
