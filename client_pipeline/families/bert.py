"""Hugging Face BERT and its relatives: embeddings on the CU, the encoder's layers as TEBs, the head on the server.

The head of masked-language modelling reads the word embeddings, which stay on the CU.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from client_pipeline.families.encoder import ClassifierHead, EncoderEmbedding, EncoderFamily, MaskedLMHead, in_turn
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, ModelSpec


class Bert(EncoderFamily):
    """BERT and ERNIE, with a pooler and a classifier on the server."""

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``BertFor...`` of one of the heads; the parts share its parameters."""
        head: nn.Module
        if spec.head == MASKED_LM:
            head = MaskedLMHead(model.cls.predictions, self.tied(spec))
        else:
            head = ClassifierHead(spec, model.base_model.pooler, model.dropout, model.classifier)
        body = model.base_model
        return self.joined(model, spec, EncoderEmbedding(body.embeddings), body.encoder.layer, head)


class FirstTokenPooler(nn.Module):
    """DistilBERT's pooler: the first token's state through a linear layer and a ReLU."""

    def __init__(self, pre_classifier: nn.Module) -> None:
        super().__init__()
        self.pre_classifier = pre_classifier

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Pool to [B, D]."""
        return cast(Tensor, self.pre_classifier(hidden_BTD[:, 0])).relu()


class DistilBert(EncoderFamily):
    """DistilBERT: as BERT, without token types; its pooler is ``pre_classifier`` and a ReLU."""

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``DistilBertFor...`` of one of the heads; the parts share its parameters."""
        head: nn.Module
        if spec.head == MASKED_LM:
            layers = model.vocab_transform, model.activation, model.vocab_layer_norm
            head = MaskedLMHead(in_turn(*layers, decoder=model.vocab_projector), self.tied(spec))
        else:
            pooler = FirstTokenPooler(model.pre_classifier) if spec.head == SEQUENCE_CLASSIFICATION else None
            head = ClassifierHead(spec, pooler, model.dropout, model.classifier)
        embedding = EncoderEmbedding(model.distilbert.embeddings, ("input_ids",))
        return self.joined(model, spec, embedding, model.distilbert.transformer.layer, head)


class ProjectedEmbedding(EncoderEmbedding):
    """Embeddings of ``embedding_size``, brought to the model width where the two differ."""

    def __init__(self, embeddings: nn.Module, embeddings_project: nn.Module | None) -> None:
        super().__init__(embeddings)
        self.embeddings_project = embeddings_project

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D]."""
        x = super().forward(batch)
        return x if self.embeddings_project is None else cast(Tensor, self.embeddings_project(x))


class Electra(EncoderFamily):
    """ELECTRA: narrow embeddings, widened on the CU by ``embeddings_project``.

    Its masked-lm head is the generator's, which predicts in the width of the embeddings.
    """

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split an ``ElectraFor...`` of one of the heads; the parts share its parameters."""
        head: nn.Module
        if spec.head == MASKED_LM:
            head = MaskedLMHead(in_turn(model.generator_predictions, decoder=model.generator_lm_head), self.tied(spec))
        else:
            head = ClassifierHead(spec, None, getattr(model, "dropout", None), model.classifier)
        project = getattr(model.electra, "embeddings_project", None)
        embedding = ProjectedEmbedding(model.electra.embeddings, project)
        return self.joined(model, spec, embedding, model.electra.encoder.layer, head)


class Roberta(EncoderFamily):
    """RoBERTa, XLM-R, CamemBERT and data2vec: as BERT, but a sequence's head takes the first token's state itself.

    Positions count the tokens that are not ``pad_token_id``, so they are found where the ids are: on the CU.
    """

    def max_length(self, spec: ModelSpec) -> int:
        """Return the longest sequence that a model has positions for, which begin after the padding's."""
        config = self.library_config(spec)
        return int(config.max_position_embeddings - config.pad_token_id - 1)

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``(XLM)RobertaFor...`` of one of the heads; the parts share its parameters."""
        head: nn.Module
        if spec.head == MASKED_LM:
            head = MaskedLMHead(model.lm_head, self.tied(spec))
        else:
            head = ClassifierHead(spec, None, getattr(model, "dropout", None), model.classifier)
        body = model.base_model
        return self.joined(model, spec, EncoderEmbedding(body.embeddings), body.encoder.layer, head)
