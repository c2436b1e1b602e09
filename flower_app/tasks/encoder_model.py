"""The encoder model of a task with labels: sized by the ``[model]`` table, or pretrained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from client_pipeline.partition.families import load_pretrained
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import ModelSpec
from flower_app.tasks.base import ModelOptions
from flower_app.tasks.tokenizer import TextTokenizer

ENCODERS = ("bert",)
"""Families that can carry a head over labels."""
_PADDING = 128
"""A vocabulary of this many more rows than tokens counts as rounded up."""


def check_model(task: str, model: ModelOptions, max_length: int) -> None:
    """Refuse a ``[model]`` table that no encoder can be built from, before anything long is done.

    Raises
    ------
    ValueError
        For another family, an option that encoders do not have, or a pretrained model that cannot be read or is too
        short for ``data.max-length``.
    """
    if model.family not in ENCODERS:
        raise ValueError(
            f"task.name = {task} trains an encoder: expected model.family = {' or '.join(ENCODERS)}, "
            f"found {model.family!r}"
        )
    if model.label_smoothing:
        raise ValueError(
            f"model.label-smoothing: task.name = {task} has none; found {model.label_smoothing}, set it to 0"
        )
    if max_length < 3:
        raise ValueError(
            f"data.max-length: expected at least 3 (the first and last token are marks), found {max_length}"
        )
    if model.pretrained:
        config = _pretrained_config(model.pretrained)
        if config.model_type != model.family:
            raise ValueError(
                f"model.pretrained: {model.pretrained} is of type {config.model_type!r}, but model.family = "
                f"{model.family}; change one of them"
            )
        if max_length > config.max_position_embeddings:
            raise ValueError(
                f"data.max-length: {max_length} exceeds the {config.max_position_embeddings} positions of "
                f"{model.pretrained}; lower it"
            )


def load_encoder(
    model: ModelOptions,
    head: str,
    labels: Sequence[str],
    class_weights: Sequence[float] | None,
    tokenizer: TextTokenizer,
    seed: int,
) -> tuple[ModelSpec, Mapping[str, Tensor] | None]:
    """Specify the model, and load its pretrained weights.

    Parameters
    ----------
    model : the ``[model]`` table
    head : ``sequence-classification`` or ``token-classification``
    labels : names of the classes, in the order of the logits
    class_weights : factor of each class's loss; None: all 1
    tokenizer : whose ids the model reads
    seed : draws the head of a pretrained model

    Returns
    -------
    The specification, and every weight by its global name; None where all weights are fresh.
    """
    weights = None
    if model.pretrained:
        check_vocabulary(model, tokenizer)
        try:
            parts = load_pretrained(model.pretrained, head, len(labels), seed)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"model.pretrained: the weights of {model.pretrained} cannot be loaded as safetensors: {error}"
            ) from error
        found = _pretrained_config(model.pretrained)
        spec, weights = parts.spec, parts.weights()
        sizes = {"vocab_size": found.vocab_size, "max_position_embeddings": found.max_position_embeddings}
    else:
        spec = ModelSpec(family=model.family, head=head)
        sizes = {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": model.width,
            "num_hidden_layers": model.encoder_layers,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.feed_forward,
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": model.dropout,
            "max_position_embeddings": model.max_length,
            "pad_token_id": tokenizer.pad_id,
        }
    names = {"num_labels": len(labels), "id2label": {str(i): name for i, name in enumerate(labels)}}
    own = {} if class_weights is None else {"class_weights": list(class_weights)}
    return replace(spec, config={**spec.config, **sizes, **names, **own}), weights


def check_vocabulary(model: ModelOptions, tokenizer: TextTokenizer) -> None:
    """Refuse a tokenizer that is not the pretrained model's."""
    rows = int(_pretrained_config(model.pretrained).vocab_size)
    if not rows - _PADDING < tokenizer.vocab_size <= rows:
        raise ValueError(
            f"data.tokenizer: its vocabulary of {tokenizer.vocab_size} tokens does not match the {rows} of "
            f"{model.pretrained}; use the tokenizer that the model was trained with"
        )


def labels_of(spec: ModelSpec) -> tuple[str, ...]:
    """Names of a model's classes, in the order of its logits."""
    names = spec.config["id2label"]
    return tuple(names[str(i)] for i in range(len(names)))


def longest_of(spec: ModelSpec) -> int:
    """Longest sequence that a model has positions for."""
    return int(spec.config["max_position_embeddings"])


def predict_batch(parts: ModelParts, batch: Batch) -> tuple[list[list[int]], float, int]:
    """Run the model on a batch, with ``labels``.

    Returns
    -------
    The best class of every labelled position, by example; the plain (unweighted) cross-entropy, summed over them; their
    number.
    """
    labels = batch["labels"].reshape(len(batch["input_ids"]), -1)
    logits_BUC = parts.logits(batch).reshape(*labels.shape, -1)
    real = labels != IGNORED_LABEL
    loss = F.cross_entropy(logits_BUC[real], labels[real], reduction="sum")
    best = logits_BUC.argmax(dim=-1)
    return [row[mask].tolist() for row, mask in zip(best, real, strict=True)], float(loss), int(real.sum())


def _pretrained_config(source: str) -> Any:
    """Read the configuration of a folder or hub id."""
    from transformers import AutoConfig, BertConfig

    file = Path(source) / "config.json"
    try:
        if file.is_file() and "model_type" not in json.loads(file.read_text(encoding="utf-8")):
            # The first BERT checkpoints carry no model_type.
            return BertConfig.from_json_file(file)
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model.pretrained: expected a folder with config.json and safetensors weights, or a hub id, "
            f"found {source!r} ({first_line})"
        ) from error
