"""Records every operation at the door to the disk, in all processes of a run: on ``PYTHONPATH`` it is imported first.

``RECORDED_ROOT`` is the folder whose operations are recorded, ``RECORDED_LOG`` the file that gets a JSON line for each,
in their order over all processes; what is written lies in files beside it, named by their SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOOR = "client_pipeline.durable"


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the recording disk in its place as soon as the door is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != DOOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def recorded(module: ModuleType) -> None:
            execute(module)
            module.disk = _recording(module.Disk)  # type: ignore[attr-defined]

        spec.loader.exec_module = recorded  # type: ignore[method-assign]
        return spec


def _recording(base: Any) -> Any:
    root, log = Path(os.environ["RECORDED_ROOT"]), Path(os.environ["RECORDED_LOG"])

    def wrapped(kind: str) -> Any:
        do = getattr(base, kind)

        def operation(self: Any, path: Path, value: Any = None) -> None:
            with log.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                there = path.exists() or path.is_symlink()
                do(self, path, *(() if value is None else (value,)))
                if path.is_relative_to(root) and (kind != "remove" or there):
                    line = {"kind": kind, "path": str(path.relative_to(root)), "value": _kept(kind, path, value)}
                    file.write(json.dumps(line) + "\n")

        return operation

    def _kept(kind: str, path: Path, value: Any) -> Any:
        if kind in ("fill", "append"):
            data = path.read_bytes() if kind == "fill" else value
            name = hashlib.sha256(data).hexdigest()
            (log.parent / name).write_bytes(data)
            return name
        return str(value.relative_to(root)) if kind == "rename" else value

    kinds = ("fill", "append", "truncate", "sync", "rename", "link", "make_folder", "remove")
    return type("RecordingDisk", (base,), {kind: wrapped(kind) for kind in kinds})()


if "RECORDED_ROOT" in os.environ:
    import importlib.util

    sys.meta_path.insert(0, _Finder())
