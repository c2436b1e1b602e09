"""Hugging Face DistilBERT: as BERT, without token types; its pooler is ``pre_classifier`` and a ReLU."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from client_pipeline.partition.encoder import (
    HEADS as HEADS,
    ClassifierHead,
    EncoderEmbedding,
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
from client_pipeline.partition.masked_lm import MaskedLMHead, in_turn
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec

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
    if spec.head == MASKED_LM:
        transform, norm = nn.Linear(config.dim, config.dim), nn.LayerNorm(config.dim, eps=1e-12)
        return _masked_lm(spec, transform, norm, nn.Linear(config.dim, config.vocab_size))
    if spec.head == SEQUENCE_CLASSIFICATION:
        pooler = FirstTokenPooler(nn.Linear(config.dim, config.dim))
        return ClassifierHead(spec, pooler, nn.Dropout(config.seq_classif_dropout), linear_classifier(config))
    return ClassifierHead(spec, None, nn.Dropout(config.dropout), linear_classifier(config))


def _masked_lm(spec: ModelSpec, transform: nn.Module, norm: nn.Module, decoder: nn.Module) -> MaskedLMHead:
    from transformers.activations import get_activation

    activation = get_activation(library_config(spec).activation)
    return MaskedLMHead(in_turn(transform, activation, norm, decoder=decoder), tied(spec))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``DistilBertFor...`` of one of the heads; the parts share its parameters."""
    head: nn.Module
    if spec.head == MASKED_LM:
        head = _masked_lm(spec, model.vocab_transform, model.vocab_layer_norm, model.vocab_projector)
    else:
        pooler = FirstTokenPooler(model.pre_classifier) if spec.head == SEQUENCE_CLASSIFICATION else None
        head = ClassifierHead(spec, pooler, model.dropout, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=EncoderEmbedding(model.distilbert.embeddings, _INPUTS),
        blocks=model.distilbert.transformer.layer,
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
