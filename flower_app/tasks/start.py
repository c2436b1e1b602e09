"""Start of a model: fresh weights sized by the ``[model]`` table, a pretrained model, or another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from client_pipeline.families.families import max_length, merged, read_library_config
from client_pipeline.families.hugging_face import (
    CLASS_WEIGHTS,
    LABEL_SMOOTHING,
    SERVER_LAYERS,
    sized_config,
    spec_from_config,
)
from client_pipeline.families.pretrained import TAIL, load_pretrained_weights
from client_pipeline.families.registry import families, family_named, is_decoder_only, is_library
from client_pipeline.near_names import did_you_mean
from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION, ModelSpec, is_outside
from flower_app.saved_model import SavedModel, load_model
from flower_app.tasks.base import ModelConfig
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.tables import folded_label
from flower_app.tasks.tokenizer import TextTokenizer, load_tokenizer

_PADDING = 128
"""A model whose own tokenizer is not there is taken to have fewer rows than this beyond its tokens."""
_LABELS = ("num_labels", "id2label", CLASS_WEIGHTS, LABEL_SMOOTHING)
"""Keys of a specification that belong to its head's labels and loss."""


def check_model(task: str, head: str, model: ModelConfig, longest: int) -> None:
    """Refuse a ``[model]`` table from which no model of the head can start, before anything long is done.

    Raises
    ------
    ValueError
        For a family without that head, an option that it does not have, or a start that cannot be read or is too short.
    """
    if is_outside(model.family):
        heads = family_named(model.family).HEADS
        if head not in heads:
            raise ValueError(
                f"task.name = {task}: expected a model.family with the head {head}, found {model.family!r} with "
                f"{', '.join(heads)}"
            )
    elif not (is_decoder_only(model.family) and head in family_named(model.family).HEADS) and model.family not in (
        able := [family for family in families() if head in family_named(family).HEADS]
    ):
        raise ValueError(
            f"task.name = {task}: expected model.family to be one of {', '.join(able)}, found {model.family!r}; a "
            f"family of your own is named module:Class{did_you_mean(model.family, able)}"
        )
    if model.label_smoothing and head != SEQ2SEQ:
        raise ValueError(
            f"model.label-smoothing: task.name = {task} has none; found {model.label_smoothing}, set it to 0"
        )
    if longest < 3:
        raise ValueError(f"data.max-length: expected at least 3 (the first and last token are marks), found {longest}")
    spec = _first_spec(head, model)
    if spec is not None:
        check_length(spec, model, longest)


def check_length(spec: ModelSpec, model: ModelConfig, longest: int) -> None:
    """Raise ``ValueError`` where sequences of ``data.max-length`` do not fit the model to start from."""
    positions = max_length(spec)
    if positions is not None and longest > positions:
        source = model.pretrained or model.from_
        raise ValueError(f"data.max-length: {longest} exceeds the {positions} positions of {source}; lower it")


def ready_tokenizer(data: DataConfig, model: ModelConfig, templates: bool = False) -> TextTokenizer | None:
    """Load the tokenizer that the configuration names; None: one is to be trained.

    Parameters
    ----------
    data : the ``[data]`` table
    model : the ``[model]`` table
    templates : whether the task's text is its author's own, who may spell out special tokens

    Raises
    ------
    ValueError
        If it cannot be read, or is not that of the model to start from.
    """
    tokenizer = _named_tokenizer(data, model)
    if tokenizer is None:
        if data.partition == "nodes":
            raise ValueError(
                "data.tokenizer: expected a tokenizer's folder or hub id with data.partition = nodes, found none; the "
                "server sees no training text to train one on"
            )
        return None
    # A run that starts from another one reads text as that one did.
    reads_special = tokenizer.settings.reads_special if model.from_ and not data.tokenizer else templates
    if data.special_tokens != "auto":
        reads_special = data.special_tokens == "tokens"
    return tokenizer.with_settings(reads_special=reads_special, classes=())


def _named_tokenizer(data: DataConfig, model: ModelConfig) -> TextTokenizer | None:
    if model.from_:
        saved = run_to_start_from(model)
        rows, model_tokenizer = int(saved.spec.config["vocab_size"]), TextTokenizer.from_json(saved.tokenizer_json)
        return _matching_tokenizer(data.tokenizer, model_tokenizer, rows, model) if data.tokenizer else model_tokenizer
    if model.pretrained:
        rows = int(_pretrained_config(model.pretrained).vocab_size)
        load = partial(load_tokenizer, complete=False, model=model.pretrained)
        if data.tokenizer:
            try:
                model_tokenizer = load(model.pretrained, "model.pretrained")
            except ValueError:
                # The model comes without one: its size is all that can be compared.
                tokenizer = load_tokenizer(data.tokenizer, complete=False, model=model.pretrained)
                _check_rows(tokenizer, "data.tokenizer", rows, model.pretrained, least=rows - _PADDING + 1)
                return tokenizer
            return _matching_tokenizer(data.tokenizer, model_tokenizer, rows, model)
        model_tokenizer = load(model.pretrained, "model.pretrained")
        _check_rows(model_tokenizer, "model.pretrained", rows, model.pretrained)
        return model_tokenizer
    return load_tokenizer(data.tokenizer) if data.tokenizer else None


def load_start(
    head: str,
    model: ModelConfig,
    tokenizer: TextTokenizer,
    seed: int,
    labels: Sequence[str] = (),
    class_weights: Sequence[float] | None = None,
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Specify the model, and load what it starts from.

    Parameters
    ----------
    head : what is trained
    model : the ``[model]`` table
    tokenizer : whose ids the model reads
    seed : draws a new head of a pretrained model
    labels : of a classifier: names of the classes, in the order of the logits
    class_weights : of a classifier: factor of each class's loss; None: all 1

    Returns
    -------
    The specification, and by global name the weights that are not fresh.
    """
    library_values: dict[str, Any] = {}
    if head == CAUSAL_LM or is_decoder_only(model.family):
        library_values[SERVER_LAYERS] = model.decoder_layers
    if head == SEQUENCE_CLASSIFICATION and is_decoder_only(model.family):
        # The library's classifier finds a text's last token by it.
        library_values["pad_token_id"] = tokenizer.pad_id
    if head == SEQ2SEQ and model.label_smoothing:
        library_values[LABEL_SMOOTHING] = model.label_smoothing
    if labels:
        library_values |= {"num_labels": len(labels), "id2label": {str(i): name for i, name in enumerate(labels)}}
    if class_weights is not None:
        library_values[CLASS_WEIGHTS] = list(class_weights)
    if model.from_:
        return _continued(run_to_start_from(model), head, library_values, model.new_head)
    if model.pretrained:
        try:
            server_layers = library_values.get(SERVER_LAYERS, 0)
            new_head = bool(labels) and model.new_head
            spec, weights = load_pretrained_weights(model.pretrained, head, len(labels), seed, server_layers, new_head)
        except FileNotFoundError as error:
            raise ValueError(f"model.pretrained: {error}") from error
        return replace(spec, config={**spec.config, **library_values}), weights
    if not is_library(model.family):
        return ModelSpec(family=model.family, head=head, config=table_sizes(model, tokenizer) | library_values), {}
    config = sized_config(
        model.family,
        vocab_size=tokenizer.vocab_size,
        width=model.width,
        num_heads=model.num_heads,
        key_value_heads=model.key_value_heads,
        feed_forward=model.feed_forward,
        num_layers=model.encoder_layers + library_values.get(SERVER_LAYERS, 0),
        dropout=model.dropout,
        max_length=model.max_length,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        decoder_layers=model.decoder_layers,
    )
    return spec_from_config(config, head, **library_values), {}


def table_sizes(model: ModelConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return what a family that is not the library's finds in its specification: sizes and tokens."""
    names = ("width", "num_heads", "feed_forward", "encoder_layers", "decoder_layers", "dropout", "norm", "max_length")
    return {name: getattr(model, name) for name in (*names, "label_smoothing")} | {
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
    }


def run_to_start_from(model: ModelConfig) -> SavedModel:
    """Read the model of the run that ``model.from`` names.

    Raises
    ------
    ValueError
        If there is none, or it is of another family.
    """
    try:
        saved_model = load_model(Path(model.from_), model.family)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"model.from: expected the directory of a run, or its name in runs-dir, found {model.from_!r}: {error}"
        ) from error
    if saved_model.spec.family != model.family:
        raise ValueError(
            f"model.from: the model of {model.from_} is of family {saved_model.spec.family}, but model.family = "
            f"{model.family}; change one of them"
        )
    return saved_model


def _matching_tokenizer(source: str, start_tokenizer: TextTokenizer, rows: int, model: ModelConfig) -> TextTokenizer:
    """Load a tokenizer for a model that has one; both must give every token the same id."""
    # Where that was trained from fresh weights with this one, it holds the marks that were added then.
    for complete in (True, False):
        tokenizer = load_tokenizer(source, complete=complete, model=model.pretrained)
        if tokenizer.vocabulary() == start_tokenizer.vocabulary():
            return tokenizer
    start = model.pretrained or model.from_
    _check_rows(tokenizer, "data.tokenizer", rows, start)
    vocabulary, start_vocabulary = tokenizer.vocabulary(), start_tokenizer.vocabulary()
    # Of the model's tokens the first; else one that the model does not know.
    tokens = [
        *sorted(start_vocabulary, key=start_vocabulary.__getitem__),
        *sorted(vocabulary, key=vocabulary.__getitem__),
    ]
    token = next(token for token in tokens if vocabulary.get(token) != start_vocabulary.get(token))
    raise ValueError(
        f"data.tokenizer: {source} gives the token {token!r} the id {vocabulary.get(token, 'none')}, expected "
        f"{start_vocabulary.get(token, 'none')} as in the tokenizer of {start}; leave data.tokenizer empty to use that "
        "one"
    )


def _check_rows(tokenizer: TextTokenizer, key: str, rows: int, start: str, least: int = 0) -> None:
    if not least <= tokenizer.vocab_size <= rows:
        raise ValueError(
            f"{key}: its vocabulary of {tokenizer.vocab_size} tokens does not match the {rows} of {start}; use the "
            "tokenizer that the model was trained with"
        )


def _continued(
    saved_model: SavedModel, head: str, library_values: Mapping[str, Any], new_head: bool
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    kept = {key: value for key, value in saved_model.spec.config.items() if key not in _LABELS}
    if "pad_token_id" in library_values:
        kept.pop("pad_token_id", None)
    # Which blocks the server has is the run's own, as all sizes are.
    spec = ModelSpec(family=saved_model.spec.family, head=head, config={**library_values, **kept})
    # The head goes on where it says the same things, whatever their spelling.
    says, is_to_say = (
        {number: folded_label(name) for number, name in (values.get("id2label") or {}).items()}
        for values in (saved_model.spec.config, library_values)
    )
    same = head == saved_model.spec.head and says == is_to_say
    drawn = new_head and "id2label" in library_values
    goes_on = same and not drawn
    weights = merged(saved_model.parts).weights(head=goes_on)
    # A tail that the control units had is the head's.
    return spec, {name: value for name, value in weights.items() if goes_on or not name.startswith(TAIL)}


def _first_spec(head: str, model: ModelConfig) -> ModelSpec | None:
    """Return the architecture to start from; None: it will be sized by the table."""
    if model.from_:
        return run_to_start_from(model).spec
    if not model.pretrained:
        return None
    config = _pretrained_config(model.pretrained)
    if config.model_type != model.family:
        raise ValueError(
            f"model.pretrained: {model.pretrained} is of type {config.model_type!r}, but model.family = "
            f"{model.family}; change one of them"
        )
    # The data says how many classes there are.
    config.num_labels = 2
    return spec_from_config(config, head)


def _pretrained_config(source: str) -> Any:
    try:
        return read_library_config(source)
    except (FileNotFoundError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model.pretrained: expected a folder with config.json and safetensors weights, or a hub id, "
            f"found {source!r} ({first_line})"
        ) from error
