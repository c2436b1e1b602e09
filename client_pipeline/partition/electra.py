"""Hugging Face ELECTRA: narrow embeddings, widened on the CU by ``embeddings_project``.

Its masked-lm head is the generator's, which predicts in the width of the embeddings.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

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
from client_pipeline.partition.masked_lm import MaskedLMHead, in_turn
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


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
    from transformers.models.electra.modeling_electra import ElectraClassificationHead, ElectraGeneratorPredictions

    config = library_config(spec)
    if spec.head == MASKED_LM:
        decoder = nn.Linear(config.embedding_size, config.vocab_size)
        return MaskedLMHead(in_turn(ElectraGeneratorPredictions(config), decoder=decoder), tied(spec))
    if spec.head == SEQUENCE_CLASSIFICATION:
        return ClassifierHead(spec, None, None, ElectraClassificationHead(config))
    return ClassifierHead(spec, None, classifier_dropout(config), linear_classifier(config))


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split an ``ElectraFor...`` of one of the heads; the parts share its parameters."""
    head: nn.Module
    if spec.head == MASKED_LM:
        head = MaskedLMHead(in_turn(model.generator_predictions, decoder=model.generator_lm_head), tied(spec))
    else:
        head = ClassifierHead(spec, None, getattr(model, "dropout", None), model.classifier)
    project = getattr(model.electra, "embeddings_project", None)
    return ModelParts(
        spec=spec,
        embedding=ProjectedEmbedding(model.electra.embeddings, project),
        blocks=model.electra.encoder.layer,
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(fresh_model(spec, library_config(spec)), spec)
