"""Keys of doors: drawn here, shown once, and kept as a digest."""

# Apart from the door itself: a box's main program draws the key, and never imports the server.

from __future__ import annotations

import hashlib
import secrets
from operator import methodcaller
from pathlib import Path

from client_pipeline import durable

KEY_FILE = "serve-key.sha256"
"""File with the digest of a door's key."""
_KEY_BYTES = 16


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
        If the file of the digest holds something else.
    """
    path = folder / KEY_FILE
    if path.is_file() and not new:
        try:
            digest = bytes.fromhex(path.read_text(encoding="ascii").strip())
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ValueError(f"{path}: expected the digest of a key, found something else; remove it, for another key")
        return "", digest
    key = secrets.token_urlsafe(_KEY_BYTES)
    write = methodcaller("write_text", key_digest(key).hex() + "\n", encoding="ascii")
    durable.write_file(path, write, mode=0o600)
    return key, key_digest(key)
