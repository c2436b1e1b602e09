"""Hugging Face BERT: embeddings on the CU, ``encoder.layer[i]`` as TEBs, pooler and classifier on the server.

The head of masked-language modelling reads the word embeddings, which stay on the CU.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from client_pipeline.partition.encoder import (
    HEADS as HEADS,
    ClassifierHead,
    EncoderEmbedding,
    classifier_dropout,
    library_config as library_config,
    linear_classifier,
    mask_form as mask_form,
    num_blocks as num_blocks,
    tied as tied,
    width as width,
)
from client_pipeline.partition.hugging_face import (
    fresh_model,
    spec_from_config as spec_from_config,
    spec_from_model as spec_from_model,
)
from client_pipeline.partition.masked_lm import MaskedLMHead, with_one_bias
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


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
    from transformers.models.bert.modeling_bert import BertLMPredictionHead, BertPooler

    config = library_config(spec)
    if spec.head == MASKED_LM:
        return MaskedLMHead(with_one_bias(BertLMPredictionHead(config)), tied(spec))
    pooler = BertPooler(config) if spec.head == SEQUENCE_CLASSIFICATION else None
    return ClassifierHead(spec, pooler, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``BertFor...`` of one of the heads; the parts share its parameters."""
    head: nn.Module
    if spec.head == MASKED_LM:
        head = MaskedLMHead(model.cls.predictions, tied(spec))
    else:
        head = ClassifierHead(spec, model.bert.pooler, model.dropout, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.bert.embeddings),
        blocks=model.bert.encoder.layer,
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
