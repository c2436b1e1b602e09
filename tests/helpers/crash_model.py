"""Possible contents of a disk after a crash: operations recorded at the one door, replayed up to any of them.

The model is that of the ALICE study (Pillai et al., OSDI 2014) for a journaling file system: names in a folder change
in order, and are safe once the folder is synced; a file's content is safe once the file is synced, and may be
missing or torn until then, whatever its name is.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from client_pipeline.durable import Disk


class Operation(NamedTuple):
    """One call of the disk's; paths are relative to the recorded folder."""

    kind: str
    path: str
    value: bytes | int | str = b""


class RecordingDisk(Disk):
    """Does what it is told, and keeps the record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []

    def _note(self, kind: str, path: Path, value: bytes | int | str = b"") -> None:
        self.operations.append(Operation(kind, str(path.relative_to(self.root)), value))

    def fill(self, path, write):
        super().fill(path, write)
        self._note("fill", path, path.read_bytes())

    def append(self, path, data):
        super().append(path, data)
        self._note("append", path, data)

    def truncate(self, path, size):
        super().truncate(path, size)
        self._note("truncate", path, size)

    def sync(self, path):
        super().sync(path)
        self._note("sync", path)

    def rename(self, path, target):
        super().rename(path, target)
        self._note("rename", path, str(target.relative_to(self.root)))

    def link(self, path, target):
        super().link(path, target)
        self._note("link", path, target)

    def make_folder(self, path):
        super().make_folder(path)
        self._note("make_folder", path)

    def remove(self, path):
        if path.exists() or path.is_symlink():
            self._note("remove", path)
        super().remove(path)


class FullDisk(Disk):
    """Has no space left for one operation: half of what it writes stays behind. Nothing is synced."""

    WRITES = ("fill", "append", "rename", "link", "make_folder", "sync")

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.count = 0

    def _spend(self, path, leave_half=lambda: None) -> None:
        """Do one operation more; at the one that fails, leave half of it behind."""
        self.count += 1
        if self.count == self.fails_at:
            leave_half()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def fill(self, path, write):
        super().fill(path, write)
        self._spend(path, lambda: os.truncate(path, path.stat().st_size // 2))

    def append(self, path, data):
        append = super().append
        self._spend(path, lambda: append(path, data[: len(data) // 2]))
        append(path, data)

    def sync(self, path):
        self._spend(path)

    def rename(self, path, target):
        self._spend(path)
        super().rename(path, target)

    def link(self, path, target):
        self._spend(path)
        super().link(path, target)

    def make_folder(self, path):
        self._spend(path)
        super().make_folder(path)


@dataclass
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass
class _Link:
    target: str


@dataclass
class _Folder:
    names: dict[str, _File | _Link | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Link | _Folder] = field(default_factory=dict)


LOSSES = ("nothing", "content", "half", "zeros", "names", "names and content")
"""Kinds of loss of unsynced data in a crash."""


class DiskModel:
    """A folder as the operations leave it, and what of it is safe."""

    def __init__(self, begun: Path | None = None) -> None:
        self.root = _Folder() if begun is None else _known(begun)

    def apply(self, operation: Operation) -> None:
        """Do one more."""
        kind, path, value = operation
        parent, name = self._parent(path)
        match kind:
            case "fill":
                parent.names[name] = _File(value)
            case "append":
                parent.names.setdefault(name, _File()).content += value
            case "truncate":
                parent.names[name].content = parent.names[name].content[:value]
            case "sync":
                node = self._node(path)
                if isinstance(node, _Folder):
                    node.synced = dict(node.names)
                else:
                    node.synced = node.content
            case "rename":
                parent.names[value.rpartition("/")[2]] = parent.names.pop(name)
            case "link":
                parent.names[name] = _Link(value)
            case "make_folder":
                parent.names[name] = _Folder()
            case "remove":
                del parent.names[name]

    def write(self, folder: Path, loss: str) -> None:
        """Make the folder that is found after a crash."""
        _write(self.root, folder, loss)

    def _node(self, path: str):
        node = self.root
        for part in Path(path).parts:
            node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        place = Path(path)
        return self._node(str(place.parent)), place.name


def _known(path: Path):
    """Return the state of an existing path: all of it is safe."""
    if path.is_symlink():
        return _Link(os.readlink(path))
    if path.is_dir():
        names = {entry.name: _known(entry) for entry in path.iterdir()}
        return _Folder(names, dict(names))
    return _File(path.read_bytes(), path.read_bytes())


def _write(node, path: Path, loss: str) -> None:
    if isinstance(node, _Link):
        path.symlink_to(node.target)
    elif isinstance(node, _Folder):
        path.mkdir()
        for name, entry in (node.synced if "names" in loss else node.names).items():
            _write(entry, path / name, loss)
    else:
        path.write_bytes(_content(node, loss))


def _content(file: _File, loss: str) -> bytes:
    if file.content == file.synced or loss in ("nothing", "names"):
        return file.content
    if loss == "half":
        grown = file.synced if file.content.startswith(file.synced) else b""
        return file.content[: (len(grown) + len(file.content)) // 2]
    if loss == "zeros":
        # The size has reached the disk, the blocks have not.
        return file.synced.ljust(len(file.content), b"\0")[: len(file.content)]
    return file.synced
