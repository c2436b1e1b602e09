"""What the encoders of Hugging Face transformers share: a bidirectional encoder under a classifier or a masked-lm head.

A family's module says how its library model is cut; configuration, heads, loss and mask are here.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.partition.hugging_face import CLASS_WEIGHTS, config_from_spec
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, MaskForm
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, ModelSpec

HEADS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, MASKED_LM)


def library_config(spec: ModelSpec, attention: str = "sdpa") -> Any:
    """Build the library's configuration of a specification; ``attention`` as in ``config_from_spec``.

    Raises
    ------
    ValueError
        For a head, a number of classes or a direction of attention that this cut has not.
    """
    config = config_from_spec(spec, HEADS, attention)
    if spec.head != MASKED_LM and config.num_labels < 2:
        raise ValueError(
            f"num_labels: expected at least 2 classes, found {config.num_labels}; regression is not supported"
        )
    for key in ("is_decoder", "add_cross_attention"):
        if getattr(config, key, False):
            raise ValueError(f"{key}: expected false for family {spec.family}, found true; only encoders can be split")
    return config


def tied(spec: ModelSpec, embedding: str = "embeddings.word_embeddings.weight") -> dict[str, str]:
    """Output layer of masked-language modelling, unless the model unties it; ``embedding`` is its name there."""
    shared = spec.head == MASKED_LM and library_config(spec).tie_word_embeddings
    return {"predictions.decoder.weight": embedding} if shared else {}


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
    """Pooler (none for tokens), dropout and classifier.

    ``class_weights`` of the specification, where given, multiply each target's loss by its class's factor.
    """

    class_weights: Tensor | None

    def __init__(
        self, spec: ModelSpec, pooler: nn.Module | None, dropout: nn.Module | None, classifier: nn.Module
    ) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = dropout
        self.classifier = classifier
        # No parameter: it is not trained, and does not travel with the weights.
        factors = spec.config.get(CLASS_WEIGHTS)
        self.register_buffer("class_weights", None if factors is None else torch.tensor(factors), persistent=False)

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Class scores: [B, classes] of sequences, [B, T, classes] of tokens."""
        del mask_BT
        pooled = hidden_BTD if self.pooler is None else self.pooler(hidden_BTD)
        return cast(Tensor, self.classifier(pooled if self.dropout is None else self.dropout(pooled)))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the labelled samples or tokens."""
        logits = self.logits(hidden_BTD, mask_BT)
        return F.cross_entropy(
            logits.flatten(0, -2),
            targets["labels"].flatten(),
            weight=self.class_weights,
            reduction="sum",
            ignore_index=IGNORED_LABEL,
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
