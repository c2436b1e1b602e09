"""Pretrained models of the transformers library, from safetensors files that are mapped and not read as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from client_pipeline.partition.base_weights import BaseWeights
from client_pipeline.partition.default_generator import drawn_aside
from client_pipeline.partition.families import LibraryAdapter, library_adapter, read_library_config
from client_pipeline.partition.hugging_face import SERVER_LAYERS, auto_model, model_class, spec_from_config
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, ModelSpec
from client_pipeline.partition.weight_files import FolderTensors, weight_folder


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

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name].detach().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def load_pretrained(source: str, head: str, num_labels: int = 0, seed: int = 0, server_layers: int = 0) -> ModelParts:
    """Load a model of any supported family of the library, with a new head where it has none.

    Weights are read from safetensors alone: a pickled checkpoint is refused.

    Parameters
    ----------
    source : folder or hub id
    head : one that the family has
    num_labels : classes of a classifier; 0: as many as the model was saved with
    seed : draws a new head
    server_layers : blocks of a causal model that the server keeps

    Raises
    ------
    FileNotFoundError
        If there is no model.
    ValueError
        If its architecture is not supported, or its weights cannot be loaded.
    """
    spec, family = _specification(source, head, num_labels, server_layers)
    library_config = family.library_config(spec)
    with drawn_aside(seed):
        try:
            model, loading = auto_model(head).from_pretrained(
                source,
                config=library_config,
                use_safetensors=True,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, RuntimeError) as error:
            raise _not_loaded(source, spec, library_config, error) from error
    _absent(model, loading, head, source)
    return _parts(model, family, head, spec)


def load_pretrained_weights(
    source: str, head: str, num_labels: int = 0, seed: int = 0, server_layers: int = 0
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
        parts = load_pretrained(source, head, num_labels, seed, server_layers)
        return parts.spec, PretrainedWeights(parts)
    spec, family = _specification(source, head, num_labels, server_layers)
    library_config = family.library_config(spec)
    views = dict(tensors)
    # As the files have them: what is converted here would be in memory, and be in no file.
    dtype = next((view.dtype for view in views.values() if view.is_floating_point()), torch.float32)
    with drawn_aside(seed):
        try:
            model, loading = model_class(head, library_config).from_pretrained(
                None,
                config=library_config,
                state_dict=views,
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (OSError, RuntimeError) as error:
            raise _not_loaded(source, spec, library_config, error) from error
    _absent(model, loading, head, source)
    if dtype != torch.float32 and loading["missing_keys"]:
        # A new head is drawn in float32.
        parts = load_pretrained(source, head, num_labels, seed, server_layers)
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


def _specification(source: str, head: str, num_labels: int, server_layers: int) -> tuple[ModelSpec, LibraryAdapter]:
    config = read_library_config(source)
    if num_labels:
        config.num_labels = num_labels
    our_settings = {SERVER_LAYERS: server_layers} if head == CAUSAL_LM else {}
    spec = spec_from_config(config, head, **our_settings)
    return spec, library_adapter(spec.family, source)


def _not_loaded(source: str, spec: ModelSpec, library_config: Any, error: Exception) -> ValueError:
    classes = f" with {library_config.num_labels} classes" if "classification" in spec.head else ""
    return ValueError(f"{source}: no weights of a {spec.family}{classes} can be loaded from safetensors: {error}")


def _absent(model: Any, loading: Mapping[str, Any], head: str, source: str) -> None:
    """Raise ``ValueError`` where a checkpoint lacks what is not of a new head."""
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


def _parts(model: Any, family: LibraryAdapter, head: str, spec: ModelSpec) -> ModelParts:
    our_settings = {key: value for key, value in spec.config.items() if key == SERVER_LAYERS}
    loaded = family.spec_from_model(model, head)
    return family.split(model, replace(loaded, config={**loaded.config, **our_settings}))
