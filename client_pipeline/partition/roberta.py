"""Hugging Face RoBERTa and XLM-R: as BERT, but a sequence's head takes the first token's state itself.

Positions count the tokens that are not ``pad_token_id``, so they are found where the ids are: on the CU.
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
    from transformers.models.roberta.modeling_roberta import RobertaClassificationHead, RobertaLMHead

    config = library_config(spec)
    if spec.head == MASKED_LM:
        return MaskedLMHead(with_one_bias(RobertaLMHead(config)), tied(spec))
    if spec.head == SEQUENCE_CLASSIFICATION:
        return ClassifierHead(spec, None, None, RobertaClassificationHead(config))
    return ClassifierHead(spec, None, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``(XLM)RobertaFor...`` of one of the heads; the parts share its parameters."""
    head: nn.Module
    if spec.head == MASKED_LM:
        head = MaskedLMHead(model.lm_head, tied(spec))
    else:
        head = ClassifierHead(spec, None, getattr(model, "dropout", None), model.classifier)
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.roberta.embeddings),
        blocks=model.roberta.encoder.layer,
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
