"""A private folder for the sockets and logs of one Ray, in the folder for temporary files, where every user may write.

Ray opens the folder that it is given to all users, so the one around it is closed to them. Who made the folder holds
the lock in it, which is its mark, too: a folder with a free lock belongs to a program that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "collapipe-"
LOCK = ".ray-folder"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""Name that ``mkdtemp`` makes."""
_LONGEST_SOCKET = f"session_2000-12-31_23-59-59_999999_{2**22}/sockets/plasma_store"
"""Longest path of a socket that Ray makes in its folder: of a process with the largest id that Linux gives."""
_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path of a socket."""
_ROOM = _MOST_BYTES - len(f"/{PREFIX}12345678/ray/{_LONGEST_SOCKET}")


@contextlib.contextmanager
def folder_for_ray(parent: str | Path) -> Iterator[Path]:
    """Make a private folder in ``parent`` with a lock that is held, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / f"{LOCK}-new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The lock gets its name only once it is held.
        os.rename(folder / f"{LOCK}-new", folder / LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def is_private_folder(folder: Path) -> bool:
    """Return whether ``mkdtemp`` made this folder for this user: no link, closed to all others, and of such a name."""
    try:
        status = folder.lstat()
    except (OSError, ValueError):
        return False
    is_closed = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    return bool(_NAME.fullmatch(folder.name)) and stat.S_ISDIR(status.st_mode) and is_closed


def short_folder() -> str:
    """Find a folder for temporary files whose path leaves Ray room for those of its sockets: the system's, or /tmp.

    Raises
    ------
    ValueError
        If there is none.
    """
    folder = tempfile.gettempdir()
    for candidate in (folder, "/tmp"):
        if len(os.fsencode(candidate)) <= _ROOM and os.access(candidate, os.W_OK):
            return candidate
    raise ValueError(
        f"TMPDIR: {folder}: expected a path of at most {_ROOM} bytes, found {len(os.fsencode(folder))}: Ray's sockets "
        "lie deep inside, and /tmp is not writable; set TMPDIR to a shorter one"
    )
