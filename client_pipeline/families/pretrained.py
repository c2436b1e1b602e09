"""Pretrained models of the transformers library, from safetensors files that are mapped and not read as a whole."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from client_pipeline.documents import json_value
from client_pipeline.families.families import read_library_config
from client_pipeline.families.hugging_face import (
    AUTO_MODELS,
    CLUSTER_TAIL,
    SERVER_LAYERS,
    LibraryFamily,
    model_class,
    spec_from_config,
)
from client_pipeline.families.registry import is_decoder_only, library_family
from client_pipeline.partition.dropout_seed import drawn_aside
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, ModelSpec
from client_pipeline.weights.base_weights import BaseWeights
from client_pipeline.weights.hub_ids import is_offline
from client_pipeline.weights.weight_files import FolderTensors, model_file, weight_folder


class PretrainedWeights(Mapping[str, Tensor]):
    """Float32 weights of a pretrained model by global name: views of its files where those hold float32.

    Parameters
    ----------
    parts : the model, with the numbers as its files have them
    base : where embedding and TEBs are in the files; None: not all of them are there as they are used
    whole_base : the same, with the head
    """

    def __init__(
        self, parts: ModelParts, base: BaseWeights | None = None, whole_base: BaseWeights | None = None
    ) -> None:
        self._parameters = dict(parts.named_parameters())
        self.base = base
        self.whole_base = whole_base

    def renamed(self, rename: Callable[[str], str]) -> PretrainedWeights:
        """Return the same by other names; ``base`` has all that are no longer the head's."""
        other, whole = copy.copy(self), self.whole_base
        other._parameters = {rename(name): parameter for name, parameter in self._parameters.items()}
        if whole is not None:
            places = {rename(name): place for name, place in whole.places.items()}
            other.whole_base = replace(whole, places=places)
            kept = {name: place for name, place in places.items() if not name.startswith("head.")}
            other.base = replace(whole, places=kept)
        elif any(name.startswith("head.") and not rename(name).startswith("head.") for name in self._parameters):
            other.base = None
        return other

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name].detach().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


_CLASSIFIER = r"((pre_)?classifier|score)\."
"""Beginning of the names, in all families' files, of tensors that tell classes apart."""
_OTHER_OUTPUTS = {
    "regression": "a number (regression)",
    "multi_label_classification": "several labels of a text (multi-label classification)",
}
"""Problem that a classifier was trained for, and no task has -> what it gives."""


TAIL = "embedding.tail."
"""Beginning of the global names of what a control unit has of the head."""


def with_tail(
    spec: ModelSpec, weights: Mapping[str, Tensor], of_cluster: bool
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Give a causal language model's closing norm and output layer to the control unit, or back to the server.

    Parameters
    ----------
    spec, weights : of the model in either form, by global name
    of_cluster : whether they are to be the control unit's

    Returns
    -------
    The same in the form that is asked for; nothing is copied.
    """

    def renamed(name: str) -> str:
        if name.startswith(TAIL):
            name = "head." + name.removeprefix(TAIL)
        if of_cluster and name.startswith("head.") and not name.startswith("head.blocks."):
            return TAIL + name.removeprefix("head.")
        return name

    config = {key: value for key, value in spec.config.items() if key != CLUSTER_TAIL}
    spec = replace(spec, config=config | ({CLUSTER_TAIL: True} if of_cluster else {}))
    if isinstance(weights, PretrainedWeights):
        return spec, weights.renamed(renamed)
    return spec, {renamed(name): value for name, value in weights.items()}


def load_pretrained(
    source: str, head: str, num_labels: int = 0, seed: int = 0, server_layers: int = 0, new_head: bool = False
) -> ModelParts:
    """Load a model of any supported family of the library, with a new head where it has none.

    Weights are read from safetensors alone: a pickled checkpoint is refused.

    Parameters
    ----------
    source : folder or hub id
    head : one that the family has
    num_labels : classes of a classifier; 0: as many as the model was saved with
    seed : draws a new head
    server_layers : blocks of a decoder-only model that the server keeps
    new_head : draw a new classifier where the model has one

    Raises
    ------
    FileNotFoundError
        If there is no model.
    ValueError
        If its architecture is not supported, or its weights cannot be loaded.
    """
    spec, family = _specification(source, head, num_labels, server_layers)
    folder = weight_folder(source)
    tensors = {} if folder is None else FolderTensors(folder)
    names = _names_in_files(tensors, spec, family, new_head)
    is_plain = all(name == file_name for name, file_name in names.items()) and len(names) == len(tensors)
    model, _ = _loaded(
        source,
        spec,
        family,
        seed,
        source if is_plain else None,
        use_safetensors=True,
        local_files_only=is_offline(),
        dtype=torch.float32,
        state_dict=None if is_plain else {name: tensors[file_name] for name, file_name in names.items()},
    )
    return _parts(model, family, head, spec)


def load_pretrained_weights(
    source: str, head: str, num_labels: int = 0, seed: int = 0, server_layers: int = 0, new_head: bool = False
) -> tuple[ModelSpec, PretrainedWeights]:
    """Specify a pretrained model, and find its weights in its files.

    Arguments and errors are those of :func:`load_pretrained`.

    Returns
    -------
    The specification; the weights, nothing of which is in memory before it is asked for.
    """
    folder = weight_folder(source)
    tensors = None if folder is None else FolderTensors(folder)
    if tensors is None:
        parts = load_pretrained(source, head, num_labels, seed, server_layers, new_head)
        return parts.spec, PretrainedWeights(parts)
    spec, family = _specification(source, head, num_labels, server_layers)
    names = _names_in_files(tensors, spec, family, new_head)
    views = {file_name: tensors[file_name] for file_name in names.values()}
    # As the files have them: what is converted here would be in memory, and be in no file.
    dtype = next((view.dtype for view in views.values() if view.is_floating_point()), torch.float32)
    state = {name: views[file_name] for name, file_name in names.items()}
    model, loading = _loaded(source, spec, family, seed, None, state_dict=state, dtype=dtype)
    if dtype != torch.float32 and loading["missing_keys"] and not is_decoder_only(spec.family):
        # A new head is drawn in float32; not of a large model, all of which would be in memory then.
        parts = load_pretrained(source, head, num_labels, seed, server_layers, new_head)
        return parts.spec, PretrainedWeights(parts)
    parts = _parts(model, family, head, spec)
    trained = dict(parts.named_parameters())
    frozen = {name: parameter for name, parameter in trained.items() if not name.startswith("head.")}
    base = whole_base = None
    # What nobody trains and no file has is computed by whoever builds a part.
    if len(trained) == sum(1 for _ in parts.all_parameters()):
        base = BaseWeights.of_parameters(source, tensors, views, frozen.items())
        whole_base = BaseWeights.of_parameters(source, tensors, views, trained.items())
    return parts.spec, PretrainedWeights(parts, base, whole_base)


def trained_classes(source: str, head: str) -> tuple[str, ...]:
    """Return the names of the classes that a pretrained model's own classifier tells apart, in the order of its logits.

    Parameters
    ----------
    source : folder or hub id
    head : the classifier that is to be trained

    Returns
    -------
    The names; empty where the files have no classifier, so that a new one is drawn.

    Raises
    ------
    ValueError
        If the model's classifier is of another task, or the names are not as many as its classes.
    """
    config, folder = read_library_config(source), weight_folder(source)
    tensors = {} if folder is None else FolderTensors(folder)
    outputs = [name for name in tensors if re.fullmatch(r"(classifier\.(out_proj\.)?|score\.)weight", name)]
    if not outputs:
        return ()
    saved_class = (config.architectures or [""])[0]
    if saved_class and not saved_class.endswith(AUTO_MODELS[head].removeprefix("AutoModel")):
        raise ValueError(
            f"{source}: the classifier of a {saved_class} does not tell classes of {head} apart; "
            "model.new-head = true draws a new one"
        )
    rows = len(tensors[outputs[0]])
    if gives := _OTHER_OUTPUTS.get("regression" if rows == 1 else config.problem_type):
        raise ValueError(
            f"{source}: expected a classifier of single classes, found one that gives {gives}; model.new-head = true "
            "draws a new one"
        )
    names = _class_names(source, config)
    if len(names) != rows:
        raise ValueError(
            f"{source}: config.json names {len(names)} classes, its classifier has {rows}; correct id2label, or set "
            "model.new-head = true"
        )
    return names


def _class_names(source: str, config: Any) -> tuple[str, ...]:
    """Return the names of ``id2label`` by their numbers, or those of ``label2id`` where that stands alone."""
    file = model_file(source, "config.json")
    settings = json_value(file.read_text(encoding="utf-8")) if file else {}
    key, numbered = "id2label", config.id2label.items()
    if not settings.get("id2label") and settings.get("label2id"):
        key, numbered = "label2id", {number: name for name, number in settings["label2id"].items()}.items()
    by_number = {str(number): name for number, name in numbered}
    names = [by_number.get(str(number)) for number in range(len(by_number))]
    if None in names or len(set(names)) < len(names):
        raise ValueError(
            f"{source}: config.json: {key}: expected a name of its own for each of the classes from 0, found "
            f"{str(settings.get(key))[:60]}; correct it, or set model.new-head = true"
        )
    return tuple(map(str, names))


def _specification(source: str, head: str, num_labels: int, server_layers: int) -> tuple[ModelSpec, LibraryFamily]:
    config = read_library_config(source)
    if num_labels:
        config.num_labels = num_labels
    our_settings = {SERVER_LAYERS: server_layers} if is_decoder_only(config.model_type) else {}
    spec = spec_from_config(config, head, **our_settings)
    return spec, library_family(spec.family, source)


def _loaded(
    source: str, spec: ModelSpec, family: LibraryFamily, seed: int, name: str | None, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Have the library load its model; returns it with what the library says of the loading."""
    library_config = family.library_config(spec)
    with drawn_aside(seed):
        try:
            model, loading = model_class(spec.head, library_config).from_pretrained(
                name,
                config=library_config,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except (OSError, RuntimeError) as error:
            classes = f" with {library_config.num_labels} classes" if "classification" in spec.head else ""
            raise ValueError(
                f"{source}: no weights of a {spec.family}{classes} can be loaded from safetensors: {error}"
            ) from error
    _absent(model, loading, spec.head, source)
    return model, loading


def _names_in_files(
    tensors: Mapping[str, Tensor], spec: ModelSpec, family: LibraryFamily, new_head: bool
) -> dict[str, str]:
    """Return the name in the files of each tensor that a model is loaded from, by the name that the library expects.

    A multi-modal checkpoint has its text model under another prefix; what else it has is left out.
    """
    names = {name: name for name in tensors}
    if is_decoder_only(spec.family):
        names = _text_names(tensors, family.unfilled_parts(spec).reference)
    return {name: found for name, found in names.items() if not (new_head and re.match(_CLASSIFIER, name))}


def _text_names(tensors: Collection[str], model: Any) -> dict[str, str]:
    prefix, matrix = f"{model.base_model_prefix}.", model.get_input_embeddings().weight
    expected = dict(model.named_parameters())
    own = {name.removeprefix(prefix) for name in expected if name.startswith(prefix)}
    embedding = next(name for name, parameter in expected.items() if parameter is matrix).removeprefix(prefix)

    def ending_with(name: str) -> list[str]:
        return [found for found in tensors if f".{found}".endswith(f".{name}")]

    starts = [found.removesuffix(embedding) for found in ending_with(embedding)]
    # Other parts may have an embedding of the same name.
    start = max(starts, key=lambda each: sum(each + name in tensors for name in own), default=prefix)
    if start in ("", prefix):
        return {name: name for name in tensors}
    names = {prefix + found.removeprefix(start): found for found in tensors if found.startswith(start)}
    for output in expected.keys() - {prefix + name for name in own}:
        if places := ending_with(output):
            names[output] = max(places, key=lambda place: len(os.path.commonprefix([place, start])))
    return names


def _absent(model: Any, loading: Mapping[str, Any], head: str, source: str) -> None:
    """Raise ``ValueError`` where a checkpoint lacks what is not of a new head, or has it in another shape."""
    for name, shape, expected in sorted(loading["mismatched_keys"]):
        raise ValueError(
            f"{source}: its tensor {name} has the shape {list(shape)}, expected {list(expected)} as its config.json "
            "and the labels say; give the whole checkpoint, or the number of classes that it was trained with"
        )
    absent_names = list(loading["missing_keys"])
    if head not in (SEQ2SEQ, CAUSAL_LM):
        # A classifier, a pooler under it, or the prediction layers may be new.
        absent_names = [
            name for name in absent_names if name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name
        ]
    if absent_names:
        raise ValueError(
            f"{source}: the weights lack {len(absent_names)} of the model's tensors, "
            f"{sorted(absent_names)[:3]} among them; give the whole checkpoint"
        )


def _parts(model: Any, family: LibraryFamily, head: str, spec: ModelSpec) -> ModelParts:
    our_settings = {key: value for key, value in spec.config.items() if key == SERVER_LAYERS}
    loaded = family.spec_from_model(model, head)
    return family.split(model, replace(loaded, config={**loaded.config, **our_settings}))
