"""Files and folders that are there whole after a power cut, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def put_in_place(aside: Path, final: Path) -> None:
    """Give a file or folder of files its name in one step, after all of it has reached the disk."""
    for path in (*aside.iterdir(), aside) if aside.is_dir() else (aside,):
        _sync(path)
    os.replace(aside, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
