"""Safetensors files of a model's folder, mapped into memory: a tensor's pages are read when it is, and shared.

Processes of one machine that map the same file have one copy of it between them.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client_pipeline.documents import json_value
from client_pipeline.durable import file_identity
from client_pipeline.weights.hub_ids import is_offline

INDEX = "model.safetensors.index.json"
"""Says which of a model's several files holds which tensor."""
SINGLE = "model.safetensors"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
"""A file of the folder itself: what another machine names becomes part of a path."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class MappedFile(Mapping[str, Tensor]):
    """One safetensors file by its tensors' names. They are views of the file: whoever would write to one takes a copy.

    Parameters
    ----------
    path : of the file

    Raises
    ------
    ValueError
        If it is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            # It checks that the tensors lie one after the other and fill the file.
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, {error}; fetch it again") from error
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(header_size))
            # What is written would be this process's own, and never reaches the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = 8 + header_size
        self.names = frozenset(names)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as a view of the file.

        Raises
        ------
        ValueError
            If the file has none of that name, or one of a type that a model has no use for.
        """
        if name not in self.names:
            raise ValueError(f"{self.path}: expected a tensor {name!r}; the file is of another model")
        described = self._header[name]
        dtype, shape = _DTYPES.get(described["dtype"]), described["shape"]
        if dtype is None:
            raise ValueError(f"{self.path}: {name} is of type {described['dtype']}; expected one of {sorted(_DTYPES)}")
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        offset = self._start + described["data_offsets"][0]
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system; they are read again when they are needed."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, last = (self._start + offset for offset in self._header[name]["data_offsets"])
        first -= first % mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def mapped_file(path: Path) -> MappedFile:
    """Map a file, once in a process as long as it does not change."""
    # Not by its resolved path: each tensor asks, and that looks at every folder. What is mapped keeps its number.
    key = file_identity(path)
    with _LOCK:
        if key not in _MAPPED:
            _MAPPED[key] = MappedFile(path.resolve())
        return _MAPPED[key]


_LOCK = threading.Lock()
_MAPPED: dict[tuple[int, ...], MappedFile] = {}


def weight_folder(source: str) -> Path | None:
    """Find the folder of a model's safetensors files; None if it has none.

    Parameters
    ----------
    source : folder, or hub id: its files are fetched to the hub's cache where they are not there
    """
    if Path(source).is_dir():
        return Path(source) if any((Path(source) / name).is_file() for name in (INDEX, SINGLE)) else None
    return _hub_folder(source)


def hub_cache_folder(hub_id: str, name: str) -> Path | None:
    """Find the folder of the hub's cache that holds a model's file; the hub is not asked, and nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(hub_id, name)
    except HFValidationError:
        # It is a path.
        return None
    return Path(path).parent if isinstance(path, str) else None


def model_file(source: str, name: str) -> Path | None:
    """Find one file of a model's folder or hub id; None if it has none of that name."""
    if Path(source).exists():
        file = Path(source) / name
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(source, name, local_files_only=is_offline(), _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        # Neither there nor a hub id.
        return None
    return None if path is None else Path(path)


@cache
def _hub_folder(source: str) -> Path | None:
    from transformers.utils.hub import cached_file

    for name in (INDEX, SINGLE):
        if (path := model_file(source, name)) is None:
            continue
        for file in _shards(path) if name == INDEX else ():
            cached_file(source, file, local_files_only=is_offline())
        return path.parent
    return None


def weight_file_names(folder: Path) -> list[str]:
    """Names of the safetensors files of a model: the one, or those that its index names.

    Raises
    ------
    ValueError
        If the index cannot be read, or names what is not in the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    names = _shards(index)
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{index}: names {name}, which is not there; fetch the whole model")
    return names


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json_value(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected an index of safetensors files, {error!r}; fetch it again") from error
    for name in names:
        if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{index}: expected names of safetensors files of its folder, found {name!r}")
    return names


class FolderTensors(Mapping[str, Tensor]):
    """All tensors of a folder's files by their names there, each mapped when it is asked for.

    Parameters
    ----------
    folder : of the model
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_names = weight_file_names(folder)
        self.file_of = {name: file for file in self.file_names for name in mapped_file(folder / file).names}

    def __getitem__(self, name: str) -> Tensor:
        return mapped_file(self.folder / self.file_of[name]).tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)
