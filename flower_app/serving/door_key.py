"""Keys of doors: drawn here, shown once, and kept as a digest."""

# Apart from the door itself: a box's main program draws the key, and never imports the server.

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from operator import methodcaller
from pathlib import Path

from client_pipeline import durable
from flower_app.runs.run_lock import guarded_file

KEY_FILE = "serve-key.sha256"
"""File with the digest of a door's key."""
_KEY_BYTES = 16
_MOST_CHARACTERS = 100


def key_digest(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def door_key(folder: Path, new: bool) -> tuple[str, bytes]:
    """Return a door's key, empty where it was told before, and its digest.

    Parameters
    ----------
    folder : where the digest is kept
    new : whether to draw another key

    Raises
    ------
    ValueError
        If the file of the digest holds something else, is a link, or others than its owner can write it.
    """
    path = folder / KEY_FILE
    with suppress(FileNotFoundError):
        if not new:
            return "", _kept_digest(path)
    key = secrets.token_urlsafe(_KEY_BYTES)
    write = methodcaller("write_text", key_digest(key).hex() + "\n", encoding="ascii")
    durable.write_file(path, write, mode=0o600)
    return key, key_digest(key)


def _kept_digest(path: Path) -> bytes:
    with guarded_file(path, os.O_RDONLY) as file:
        is_writable = os.fstat(file.fileno()).st_mode & 0o022
        try:
            digest = b"" if is_writable else bytes.fromhex(file.read(_MOST_CHARACTERS).strip())
        except ValueError:
            digest = b""
    if len(digest) != 32:
        expected = "a file that its owner alone can write" if is_writable else "the digest of a key"
        raise ValueError(f"{path}: expected {expected}, found something else; remove it, for another key")
    return digest
