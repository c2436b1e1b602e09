"""Encoders of the transformers library: a bidirectional encoder under a classifier or a masked-lm head.

A family's module says how its library model is cut; configuration, heads and loss are here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.families.hugging_face import CLASS_WEIGHTS, LibraryFamily
from client_pipeline.partition.parts import IGNORED_LABEL, Batch
from client_pipeline.partition.spec import MASKED_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, ModelSpec


class EncoderFamily(LibraryFamily):
    """A family of encoders."""

    HEADS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, MASKED_LM)
    word_embeddings = "embeddings.word_embeddings.weight"
    """Name of the matrix that the output layer of masked-language modelling reads."""

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration of a specification.

        Raises
        ------
        ValueError
            For a head, a number of classes or a direction of attention that this cut does not have.
        """
        config = super().library_config(spec)
        for key in ("is_decoder", "add_cross_attention"):
            if getattr(config, key, False):
                raise ValueError(
                    f"{key}: expected false for family {spec.family}, found true; only encoders can be split"
                )
        return config

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return the output layer of masked-language modelling, unless the model unties it."""
        shared = spec.head == MASKED_LM and self.library_config(spec).tie_word_embeddings
        return {"predictions.decoder.weight": self.word_embeddings} if shared else {}


class EncoderEmbedding(nn.Module):
    """The library's embedding module on a batch: ``input_ids`` and its other inputs."""

    def __init__(self, embeddings: nn.Module, inputs: tuple[str, ...] = ("input_ids", "token_type_ids")) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.inputs = inputs

    def forward(self, batch: Batch) -> Tensor:
        """Embed a batch; [B, T, D]. An input that the batch lacks has the library's default."""
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


class MaskedLMHead(nn.Module):
    """Transformation, and ``decoder``, the output layer over the vocabulary.

    Parameters
    ----------
    predictions : both, as the library has them: ``predictions.decoder`` is the output layer
    tied : as in :func:`client_pipeline.partition.parts.tied_names`; the weight of the output layer is in most models
        that of the word embeddings
    """

    def __init__(self, predictions: nn.Module, tied: dict[str, str]) -> None:
        super().__init__()
        self.predictions = predictions
        self.tied = tied

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Scores over the vocabulary [B, T, V], or [N, V] for N positions."""
        del mask_BT
        return cast(Tensor, self.predictions(hidden_BTD))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the masked tokens."""
        del mask_BT
        # Only positions with a loss, few of them, reach the output layer.
        masked = targets["labels"] != IGNORED_LABEL
        return F.cross_entropy(self.logits(hidden_BTD[masked]), targets["labels"][masked], reduction="sum")


def in_turn(*layers: nn.Module, decoder: nn.Module) -> nn.Sequential:
    """Put prediction layers that the library keeps apart into one module, ``decoder`` last."""
    return nn.Sequential(OrderedDict([*((str(i), layer) for i, layer in enumerate(layers)), ("decoder", decoder)]))
