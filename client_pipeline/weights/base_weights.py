"""The frozen weights of a run with adapters where every machine has the model's files: names and digests travel alone.

A :class:`BaseWeights` says which tensor of which file a frozen parameter is. It crosses the network as JSON, and each
process maps what it runs from its machine's own files: a control unit the embedding, a device its TEBs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import socket
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

from client_pipeline import durable
from client_pipeline.documents import json_value
from client_pipeline.durable import checked_digest, file_identity
from client_pipeline.weights.weight_files import (
    PLAIN_NAME,
    FolderTensors,
    hub_cache_folder,
    mapped_file,
    weight_folder,
)

WEIGHT_CACHE = "~/.collapipe/weights"
"""Folder of a machine's user for weights that are no run's own."""


class BaseFile(NamedTuple):
    """One safetensors file, as it must be everywhere."""

    name: str
    num_bytes: int
    sha256: str


class FrozenBase(Mapping[str, Tensor]):
    """Frozen weights that adapters are added to, by name. No process holds all of them; their places travel.

    Names are those of the model without adapters: global ones, or of :meth:`part` the part's own.
    """

    @abstractmethod
    def check(self) -> FrozenBase:
        """Make sure that the weights are the run's; raises ``ValueError`` if they are not."""

    @abstractmethod
    def part(self, prefix: str) -> FrozenBase:
        """Those of one part, ``embedding.`` or ``blocks.<i>.``, under its own names."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory of tensors that were asked for."""

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """Return a tensor in the type that it is kept in."""

    @abstractmethod
    def to_json(self) -> str:
        """Write what another machine needs."""


@dataclass(frozen=True, kw_only=True)
class BaseWeights(FrozenBase):
    """Frozen float32 weights by name, in files: views of them where they are float32 there, else copies."""

    source: str
    """Folder or hub id on this machine."""
    files: tuple[BaseFile, ...]
    places: Mapping[str, tuple[int, str]]
    """Number of the file, and name of the tensor in it, of each parameter."""
    checked: tuple[tuple[int, ...], ...] = ()
    """Identity on the disk of each file when its digest was last compared; empty: it has not been."""

    @classmethod
    def of_parameters(
        cls, source: str, tensors: FolderTensors, views: Mapping[str, Tensor], named: Iterable[tuple[str, Tensor]]
    ) -> BaseWeights | None:
        """Find which tensor each parameter of a loaded model is a view of; None if one is not.

        Parameters
        ----------
        source : folder or hub id
        tensors : of the folder
        views : what the model was loaded from, by the names in the files
        named : the model's parameters by global name
        """
        name_at = {view.data_ptr(): name for name, view in views.items()}
        places = {}
        for name, parameter in named:
            tensor_name = name_at.get(parameter.data_ptr())
            if tensor_name is None or views[tensor_name].shape != parameter.shape:
                return None
            places[name] = (tensors.file_names.index(tensors.file_of[tensor_name]), tensor_name)
        paths = [tensors.folder / name for name in tensors.file_names]
        # Other processes may have another working directory.
        source = str(Path(source).resolve()) if Path(source).is_dir() else source
        files = tuple(BaseFile(path.name, path.stat().st_size, checked_digest(path)) for path in paths)
        return cls(source=source, files=files, places=places, checked=tuple(map(file_identity, paths)))

    @property
    def files_are_there(self) -> bool:
        """True where all files lie, by name, in the source's folder or in this machine's cache of the hub."""
        return self._folder_here is not None

    @property
    def _folder_here(self) -> Path | None:
        # Of a part that was cut: the home of whoever is asked.
        folder = Path(self.source).expanduser()
        if not folder.is_dir() and self.files:
            folder = hub_cache_folder(self.source, self.files[0].name) or folder
        return folder if all((folder / file.name).is_file() for file in self.files) else None

    def by_digest(self, cache: Path) -> BaseWeights:
        """Return the same with files that lie in a cache and are named by their digests."""
        files = tuple(file._replace(name=f"{file.sha256}.safetensors") for file in self.files)
        return replace(self, source=str(cache), files=files, checked=())

    @cached_property
    def folder(self) -> Path:
        """Folder of the files on this machine.

        Raises
        ------
        ValueError
            If there is no such folder; the message says what is expected of it.
        """
        folder = self._folder_here or weight_folder(self.source)
        if folder is None:
            raise ValueError(
                f"model.pretrained: {self.source} is no folder with safetensors files on {socket.gethostname()}; "
                f"expected {self._described(self.files[0])}; {_REMEDY}"
            )
        return folder

    def check(self) -> BaseWeights:
        """Compare every file with its digest; returns these weights with that noted.

        A file that is, by its identity on the disk, the one that another process of this machine compared is not read
        again.

        Raises
        ------
        ValueError
            If a file is missing or is another one; the message names it, its digest and the one expected.
        """
        paths = [self.folder / file.name for file in self.files]
        for index, (path, file) in enumerate(zip(paths, self.files, strict=True)):
            if not path.is_file():
                raise ValueError(
                    f"model.pretrained: {path} is not there on {socket.gethostname()}; expected "
                    f"{self._described(file)}; {_REMEDY}"
                )
            if self.checked and file_identity(path) == self.checked[index]:
                continue
            size = path.stat().st_size
            digest = checked_digest(path) if size == file.num_bytes else "of other bytes"
            if digest != file.sha256:
                raise ValueError(
                    f"model.pretrained: {path} on {socket.gethostname()} has {size} bytes with SHA-256 "
                    f"{digest[:14]}; expected {self._described(file)}, as the server's model has; {_REMEDY}"
                )
        return replace(self, checked=tuple(map(file_identity, paths)))

    def part(self, prefix: str) -> BaseWeights:
        """Those of one part, ``embedding.`` or ``blocks.<i>.``, under its own names."""
        places = {name.removeprefix(prefix): place for name, place in self.places.items() if name.startswith(prefix)}
        return replace(self, places=places)

    def release(self) -> None:
        """Give the pages that were read of these tensors back to the system."""
        for index, name in self.places.values():
            mapped_file(self.folder / self.files[index].name).release(name)

    def stored(self, name: str) -> Tensor:
        """Return a tensor as its file has it."""
        index, tensor_name = self.places[name]
        return mapped_file(self.folder / self.files[index].name).tensor(tensor_name)

    def __getitem__(self, name: str) -> Tensor:
        return self.stored(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def to_json(self) -> str:
        """Write what another machine needs."""
        files = [file._asdict() for file in self.files]
        return json.dumps({"source": self.source, "files": files, "places": self.places})

    @classmethod
    def from_json(cls, text: str, source: str = "") -> BaseWeights:
        """Read what :meth:`to_json` wrote.

        Parameters
        ----------
        text : from another machine, or from a file
        source : folder or hub id on this machine; empty: as on the other

        Raises
        ------
        ValueError
            If the text is something else, or a file is not one of the folder itself.
        """
        try:
            raw = json_value(text)
            files = tuple(
                BaseFile(str(file["name"]), int(file["num_bytes"]), str(file["sha256"])) for file in raw["files"]
            )
            places = {str(name): _place(place, len(files)) for name, place in raw["places"].items()}
            source = source or str(raw["source"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"frozen weights: expected their files and places, found {text[:80]!r}") from error
        for file in files:
            if not PLAIN_NAME.fullmatch(file.name):
                raise ValueError(f"frozen weights: expected the plain name of a safetensors file, found {file.name!r}")
            # It names a file, too, where weights are pulled.
            if not _DIGEST.fullmatch(file.sha256) or file.num_bytes < 1:
                raise ValueError(
                    f"frozen weights: expected bytes and SHA-256 of {file.name}, found {file.num_bytes} and "
                    f"{file.sha256[:80]!r}"
                )
        return cls(source=source, files=files, places=places)

    def _described(self, file: BaseFile) -> str:
        return f"{file.name} of {file.num_bytes} bytes with SHA-256 {file.sha256[:14]}"


class CutPart(NamedTuple):
    """One part's frozen weights as a file of their own, for a device whose machine has no file with them."""

    content: bytes
    """Bytes of a safetensors file: the part's tensors as they are stored, under the part's own names."""
    base: BaseWeights
    """Their places on a device that has kept the file."""


def cut_part(base: BaseWeights) -> CutPart:
    """Cut a part out of the files of this machine; the same part gives the same file."""
    content = save({name: base.stored(name) for name in sorted(base)})
    base.release()
    digest = hashlib.sha256(content).hexdigest()
    file = BaseFile(f"{digest}.safetensors", len(content), digest)
    return CutPart(content, BaseWeights(source=WEIGHT_CACHE, files=(file,), places={name: (0, name) for name in base}))


def keep_part(content: bytes) -> None:
    """Keep a part that was cut elsewhere; nothing of one that does not fit stays.

    Raises
    ------
    ValueError
        If the disk has no room for it.
    """
    folder = Path(WEIGHT_CACHE).expanduser()
    path = folder / f"{hashlib.sha256(content).hexdigest()}.safetensors"
    try:
        durable.make_folders(folder)
        durable.write_file(path, lambda aside: aside.write_bytes(content))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"model.pretrained: the disk of {folder} on {socket.gethostname()} is full: {len(content)} bytes of a "
            f"TEB's frozen weights do not fit, {error.strerror}; make room and start the run again"
        ) from error


_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "copy the model's folder there, or start the control unit with where it lies: collapipe join --model FOLDER"


def _place(raw: Any, num_files: int) -> tuple[int, str]:
    index, name = raw
    if not isinstance(index, int) or not 0 <= index < num_files:
        raise ValueError(f"file {index!r} of {num_files}")
    return index, str(name)
