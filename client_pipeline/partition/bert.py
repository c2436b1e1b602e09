"""Hugging Face BERT: embeddings on the CU, ``encoder.layer[i]`` as TEBs, pooler and classifier on the server.

The head of masked-language modelling reads the word embeddings, which stay on the CU.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.masked_lm import MaskedLMHead
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import ModelSpec

_HEADS = ("sequence-classification", "token-classification", "masked-lm")


def _config(spec: ModelSpec) -> Any:
    from transformers import BertConfig

    if spec.head not in _HEADS:
        raise ValueError(f"model.family bert has the heads {', '.join(_HEADS)}, found {spec.head!r}")
    config = BertConfig(**spec.config)
    # Blocks are also built alone, without the model class that would choose the attention.
    config._attn_implementation = "sdpa"
    return config


def tied(spec: ModelSpec) -> dict[str, str]:
    """The output layer of masked-language modelling, unless the model unties it."""
    wanted = spec.head == "masked-lm" and _config(spec).tie_word_embeddings
    return {"predictions.decoder.weight": "embeddings.word_embeddings.weight"} if wanted else {}


class BertEmbedding(nn.Module):
    """Word, position and token-type embeddings."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``input_ids`` and, where given, ``token_type_ids``; [B, T, D]."""
        return cast(Tensor, self.embeddings(input_ids=batch["input_ids"], token_type_ids=batch.get("token_type_ids")))


class BertHead(nn.Module):
    """Pooler (sequence classification only), dropout and classifier."""

    def __init__(self, pooler: nn.Module | None, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = dropout
        self.classifier = classifier

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Class scores [B, classes], or [B, T, classes] without a pooler."""
        pooled = hidden_BTD if self.pooler is None else self.pooler(hidden_BTD)
        return cast(Tensor, self.classifier(self.dropout(pooled)))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the labelled samples or tokens."""
        del mask_BT
        logits = self.logits(hidden_BTD)
        return F.cross_entropy(
            logits.flatten(0, -2), targets["labels"].flatten(), reduction="sum", ignore_index=IGNORED_LABEL
        )


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Bool mask [B, 1, T, T] as transformers 5 gives to its sdpa attention; None when nothing is padded."""
    del dtype
    if bool(mask_BT.all()):
        return None
    return mask_BT[:, None, None, :].expand(-1, 1, mask_BT.shape[1], -1)


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return int(_config(spec).num_hidden_layers)


def width(spec: ModelSpec) -> int:
    """D."""
    return int(_config(spec).hidden_size)


def build_embedding(spec: ModelSpec) -> nn.Module:
    """Build the embeddings with fresh weights."""
    from transformers.models.bert.modeling_bert import BertEmbeddings

    return BertEmbedding(BertEmbeddings(_config(spec)))


def build_block(spec: ModelSpec, index: int) -> nn.Module:
    """Build one ``BertLayer``."""
    from transformers.models.bert.modeling_bert import BertLayer

    return cast(nn.Module, BertLayer(_config(spec), layer_idx=index))


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the head with fresh weights."""
    from transformers.models.bert.modeling_bert import BertLMPredictionHead, BertPooler

    config = _config(spec)
    if spec.head == "masked-lm":
        predictions = BertLMPredictionHead(config)
        predictions.decoder.bias = predictions.bias
        return MaskedLMHead(predictions, tied(spec))
    rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return BertHead(
        BertPooler(config) if spec.head == "sequence-classification" else None,
        nn.Dropout(rate),
        nn.Linear(config.hidden_size, config.num_labels),
    )


def split(model: Any, spec: ModelSpec) -> ModelParts:
    """Split a ``BertFor...`` of one of the heads; the parts share its parameters."""
    head: nn.Module
    if spec.head == "masked-lm":
        head = MaskedLMHead(model.cls.predictions, tied(spec))
    else:
        head = BertHead(model.bert.pooler, model.dropout, model.classifier)
    return ModelParts(
        spec=spec,
        embedding=BertEmbedding(model.bert.embeddings),
        blocks=model.bert.encoder.layer,
        head=head,
        mask_form=mask_form,
        reference=model,
    )


def _model_class(spec: ModelSpec) -> Any:
    import transformers

    return {
        "sequence-classification": transformers.BertForSequenceClassification,
        "token-classification": transformers.BertForTokenClassification,
        "masked-lm": transformers.BertForMaskedLM,
    }[spec.head]


def build_parts(spec: ModelSpec) -> ModelParts:
    """Build the whole model with fresh weights."""
    return split(_model_class(spec)(_config(spec)), spec)


def load_pretrained(source: str, head: str, num_labels: int, seed: int = 0) -> ModelParts:
    """Load a BERT from a folder or a hub id, with a new head of ``num_labels`` classes where it has none.

    ``seed`` draws the new head. Weights are read from safetensors alone: a pickled checkpoint is refused.

    Raises
    ------
    ValueError
        If ``source`` is no BERT; the message names what was found.
    """
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(source)
    if found.model_type != "bert":
        raise ValueError(f"{source}: expected a model of type bert, found {found.model_type!r}")
    spec = spec_from_config(found, head, num_labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model_class(spec).from_pretrained(
            source, num_labels=num_labels, attn_implementation="sdpa", use_safetensors=True, dtype=torch.float32
        )
    return split(model, spec)


def spec_from_config(config: Any, head: str, num_labels: int) -> ModelSpec:
    """Build a specification from a ``BertConfig``."""
    values = config.to_diff_dict()
    for key in ("id2label", "label2id", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype"):
        values.pop(key, None)
    return ModelSpec(family="bert", head=head, config={**values, "num_labels": num_labels})
