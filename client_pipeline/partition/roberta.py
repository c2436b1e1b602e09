"""Hugging Face RoBERTa and XLM-R: as BERT, but a sequence's head takes the first token's state itself.

Positions count the tokens that are not ``pad_token_id``, so they are found where the ids are: on the CU.
"""

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
from client_pipeline.partition.encoder_classifier import width as width
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import ModelSpec

# XLM-R's modules are RoBERTa's, line by line, in the library as well: parts built alone use RoBERTa's for both.


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    return EncoderEmbedding(RobertaEmbeddings(library_config(spec)))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``RobertaLayer``."""
    from transformers.models.roberta.modeling_roberta import RobertaLayer

    return cast(nn.Module, RobertaLayer(library_config(spec), layer_idx=index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.roberta.modeling_roberta import RobertaClassificationHead

    config = library_config(spec)
    if spec.head == SEQUENCE:
        return ClassifierHead(None, None, RobertaClassificationHead(config))
    return ClassifierHead(None, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``(XLM)RobertaFor{Sequence,Token}Classification``; the parts share its parameters."""
    dropout = None if spec.head == SEQUENCE else model.dropout
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.roberta.embeddings),
        blocks=model.roberta.encoder.layer,
        head=ClassifierHead(None, dropout, model.classifier),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
