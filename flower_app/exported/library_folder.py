"""A model as a folder of the transformers library, written shard by shard: no process holds it as a whole."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from client_pipeline.families.merged_weights import MergedWeights, place_of
from client_pipeline.families.registry import library_family
from client_pipeline.weights.weight_files import INDEX, SINGLE
from flower_app.saved_model import StoredModel

SHARD_BYTES = 500_000_000
"""Most bytes of a file; a layer that is larger has one of its own."""
_LAYER = re.compile(r".+?\.\d+\.")


class LibraryTensors:
    """Tensors of the library's model by its own names, adapters merged, each made when it is asked for.

    Parameters
    ----------
    stored : of a family of the library
    """

    def __init__(self, stored: StoredModel) -> None:
        self._stored = stored
        self._merged = MergedWeights(stored.spec, stored.weights, stored.base)
        self._family = library_family(stored.spec.family)
        parts = self._family.unfilled_parts(stored.spec)
        self.reference = cast(Any, parts.reference)
        """The library's model; its parameters have shapes alone."""
        self._expected: dict[str, Tensor] = self.reference.state_dict(keep_vars=True)
        name_of = {_identity(parameter): name for name, parameter in parts.all_parameters()}
        self._names = {name: name_of.get(_identity(value), "") for name, value in self._expected.items()}
        trained = {name for name, _ in parts.named_parameters()}
        self.global_names = {name: global_name for name, global_name in self._names.items() if global_name in trained}
        """Global names of all but buffers, tables that are computed and tables that no part reads."""

    def __getitem__(self, name: str) -> Tensor:
        expected = self._expected[name]
        if name not in self.global_names:
            if expected.device.type != "meta":
                return expected.detach()
            if not self._names[name]:
                # No part has it: BART's common table, where encoder and decoder have tables of their own.
                return torch.zeros(expected.shape)
            place, own_name = place_of(self._names[name])
            return self._family.build_part(self._stored.spec, place).get_parameter(own_name).detach()
        global_name = self.global_names[name]
        try:
            value = self._merged[global_name]
        except KeyError:
            raise ValueError(
                f"the saved model lacks the weight {global_name}; expected all of a {self._stored.spec.family}; train "
                "it again, or export another run"
            ) from None
        if value.shape != expected.shape:
            raise ValueError(
                f"the saved model's {global_name} has shape {list(value.shape)}, expected {list(expected.shape)}; "
                "export a run whose spec.json is its own"
            )
        return value

    @property
    def saved_names(self) -> list[str]:
        """Names that the library saves: of a tied tensor one, and nothing that it computes itself."""
        names_of: dict[int, list[str]] = {}
        ignored = set(self.reference._keys_to_ignore_on_save or ())
        for name, value in self._expected.items():
            if name not in ignored:
                names_of.setdefault(id(value), []).append(name)
        tied = self.reference.all_tied_weights_keys
        return [next((name for name in names if name not in tied), names[0]) for names in names_of.values()]

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._expected[name].nbytes

    def release(self) -> None:
        """Give back the memory of the tensors that were asked for."""
        self._merged.release()
        self._stored.release()


def _identity(tensor: Tensor) -> tuple[bool, int]:
    """Tell tensors apart: a buffer may be a parameter of the parts, over the same memory."""
    is_there = tensor.device.type != "meta"
    return is_there, tensor.data_ptr() if is_there else id(tensor)


def write_weights(tensors: LibraryTensors, folder: Path) -> None:
    """Write one file, or several of at most :data:`SHARD_BYTES` with their index.

    Raises
    ------
    ValueError
        If the disk has no room, or a weight is missing.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shards = _shards(tensors)
    total_bytes = sum(tensors.num_bytes(name) for names in shards for name in names)
    if (free_bytes := shutil.disk_usage(folder).free) < total_bytes:
        raise ValueError(
            f"{folder.parent}: the model takes {total_bytes} bytes, {free_bytes} are free; make room and try again"
        )
    file_of: dict[str, str] = {}
    num_parameters = 0
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Experts, which the library holds as one tensor, are several in files.
        shard = revert_weight_conversion(tensors.reference, {name: tensors[name] for name in names})
        save_file({name: value.contiguous() for name, value in shard.items()}, folder / file, {"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
        num_parameters += sum(value.numel() for value in shard.values())
        del shard
        tensors.release()
    if len(shards) > 1:
        sizes = {"total_parameters": num_parameters, "total_size": total_bytes}
        text = json.dumps({"metadata": sizes, "weight_map": dict(sorted(file_of.items()))}, indent=2)
        (folder / INDEX).write_text(text, encoding="utf-8")


def library_config(reference: Any) -> Any:
    """Return the configuration that the library saves with a model."""
    config = copy.deepcopy(reference.config)
    config.dtype = str(reference.dtype).removeprefix("torch.")
    config.architectures = [type(reference).__name__]
    if config.id2label and "Classification" in config.architectures[0]:
        # The library makes the way back from labels to ids only for the names that it gives itself.
        config.label2id = {label: index for index, label in config.id2label.items()}
    return config


def _shards(tensors: LibraryTensors) -> list[list[str]]:
    """Part the names, in the model's order; a layer stays together, as the library may convert it as a whole."""
    layers: dict[str, list[str]] = {}
    for name in tensors.saved_names:
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    shards: list[list[str]] = []
    room = 0
    for names in layers.values():
        size = sum(map(tensors.num_bytes, names))
        if size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1] += names
        room -= size
    return shards
