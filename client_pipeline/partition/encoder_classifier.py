"""What the encoders of the transformers library share: a bidirectional encoder under a classification head.

A family's module says how its library model is cut; configuration, head, loss and mask are here.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.parts import IGNORED_LABEL, Batch, MaskForm
from client_pipeline.partition.spec import ModelSpec

SEQUENCE = "sequence-classification"
TOKEN = "token-classification"
HEADS = (SEQUENCE, TOKEN)

_NOT_ARCHITECTURE = (
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


def spec_from_config(config: Any, head: str, num_labels: int) -> ModelSpec:
    """Build a specification from a library configuration; its model type is the family.

    Parameters
    ----------
    config : such as a ``BertConfig``
    head : one of :data:`HEADS`
    num_labels : classes
    """
    values = {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in _NOT_ARCHITECTURE and not key.startswith("_")
    }
    return ModelSpec(family=config.model_type, head=head, config={**values, "num_labels": num_labels})


def library_config(spec: ModelSpec, attention: str = "sdpa") -> Any:
    """Build the library's configuration of a specification.

    Parameters
    ----------
    spec : its family is the library's model type
    attention : name of the library's attention function. Blocks are also built alone, without the model class that
        would choose it.

    Raises
    ------
    ValueError
        For a head, a number of classes or a direction of attention that this cut has not.
    """
    from transformers import AutoConfig

    if spec.head not in HEADS:
        raise ValueError(f"model.family {spec.family} has the heads {', '.join(HEADS)}, found {spec.head!r}")
    config = AutoConfig.for_model(spec.family, **spec.config)
    if config.num_labels < 2:
        raise ValueError(f"num_labels: expected at least 2 classes, found {config.num_labels}; there is no regression")
    for key in ("is_decoder", "add_cross_attention"):
        if getattr(config, key, False):
            raise ValueError(f"{key}: expected false for family {spec.family}, found true; only encoders are cut")
    config._attn_implementation = attention
    return config


def auto_model(head: str) -> Any:
    """Return the library's ``AutoModelFor...`` class of a head."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    return AutoModelForTokenClassification if head == TOKEN else AutoModelForSequenceClassification


def fresh_model(spec: ModelSpec, config: Any) -> Any:
    """Build the library's own model with fresh weights."""
    return auto_model(spec.head).from_config(config)


class EncoderEmbedding(nn.Module):
    """The library's embedding module on a batch: ``input_ids`` and what else it takes."""

    def __init__(self, embeddings: nn.Module, inputs: tuple[str, ...] = ("input_ids", "token_type_ids")) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.inputs = inputs

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D]. What it does not bring has the library's default."""
        return cast(Tensor, self.embeddings(**{name: batch.get(name) for name in self.inputs}))


class ClassifierHead(nn.Module):
    """Pooler (none for tokens), dropout and classifier."""

    def __init__(self, pooler: nn.Module | None, dropout: nn.Module | None, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = dropout
        self.classifier = classifier

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Class scores: [B, classes] of sequences, [B, T, classes] of tokens."""
        del mask_BT
        pooled = hidden_BTD if self.pooler is None else self.pooler(hidden_BTD)
        return cast(Tensor, self.classifier(pooled if self.dropout is None else self.dropout(pooled)))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the labelled samples or tokens."""
        logits = self.logits(hidden_BTD, mask_BT)
        return F.cross_entropy(
            logits.flatten(0, -2), targets["labels"].flatten(), reduction="sum", ignore_index=IGNORED_LABEL
        )


def classifier_dropout(config: Any) -> nn.Dropout:
    """Dropout before the classifier of a configuration with ``classifier_dropout``."""
    rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(rate)


def linear_classifier(config: Any) -> nn.Linear:
    """Linear layer from the width to the classes."""
    return nn.Linear(config.hidden_size, config.num_labels)


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Bool mask [B, 1, T, T] as transformers 5 gives to its sdpa attention; None when nothing is padded."""
    del dtype
    if bool(mask_BT.all()):
        return None
    return mask_BT[:, None, None, :].expand(-1, 1, mask_BT.shape[1], -1)


def num_blocks(spec: ModelSpec) -> int:
    """L."""
    return int(library_config(spec).num_hidden_layers)


def width(spec: ModelSpec) -> int:
    """D."""
    return int(library_config(spec).hidden_size)
