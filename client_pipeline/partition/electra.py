"""Hugging Face ELECTRA (the discriminator): narrow embeddings, widened on the CU by ``embeddings_project``."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

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
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.partition.spec import ModelSpec


class ProjectedEmbedding(EncoderEmbedding):
    """Embeddings of ``embedding_size``, brought to the model width where the two differ."""

    def __init__(self, embeddings: nn.Module, embeddings_project: nn.Module | None) -> None:
        super().__init__(embeddings)
        self.embeddings_project = embeddings_project

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D]."""
        x = super().forward(batch)
        return x if self.embeddings_project is None else cast(Tensor, self.embeddings_project(x))


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.electra.modeling_electra import ElectraEmbeddings

    config = library_config(spec)
    narrow = config.embedding_size != config.hidden_size
    project = nn.Linear(config.embedding_size, config.hidden_size) if narrow else None
    return ProjectedEmbedding(ElectraEmbeddings(config), project)


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``ElectraLayer``."""
    from transformers.models.electra.modeling_electra import ElectraLayer

    return cast(nn.Module, ElectraLayer(library_config(spec), layer_idx=index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.electra.modeling_electra import ElectraClassificationHead

    config = library_config(spec)
    if spec.head == SEQUENCE:
        return ClassifierHead(None, None, ElectraClassificationHead(config))
    return ClassifierHead(None, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split an ``ElectraFor{Sequence,Token}Classification``; the parts share its parameters."""
    dropout = None if spec.head == SEQUENCE else model.dropout
    project = getattr(model.electra, "embeddings_project", None)
    return ModelParts(
        spec=spec,
        embedding=ProjectedEmbedding(model.electra.embeddings, project),
        blocks=model.electra.encoder.layer,
        head=ClassifierHead(None, dropout, model.classifier),
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
