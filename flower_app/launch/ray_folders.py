"""A folder for the sockets and logs of each simulation's Ray, and the end of those that killed runs have left.

Whoever runs the simulation holds its folder's lock. One whose lock is free belongs to nobody any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "collapipe-"
_LOCK = ".lock"
_ROOM = 30
"""Longest folder for Ray [characters]: it makes sockets deep inside, whose paths may have 107 in all."""


class RayFolder:
    """A new, private folder; those that killed runs left beside it are removed first.

    Parameters
    ----------
    parent : where it is made
    """

    def __init__(self, parent: str | Path) -> None:
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.lock = os.open(self.path / f"{_LOCK}-new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        """A descriptor; a process that inherits it holds the folder, should this one be killed."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        # Under its name it is locked from the beginning.
        os.rename(self.path / f"{_LOCK}-new", self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_abandoned(parent: str | Path) -> None:
    """Remove this user's folders whose runs are no more."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        try:
            # Anybody may write in a folder for temporary files: no link is followed, nobody else's folder is touched.
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def short_folder() -> str:
    """Find a folder for temporary files that leaves Ray room for the names of its sockets."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _ROOM or not os.access("/tmp", os.W_OK) else "/tmp"
