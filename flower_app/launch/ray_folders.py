"""Folders for the sockets and logs of each simulation's Ray, and the clean-up after runs that were killed.

The launcher of a run holds the lock of its folder. A folder whose lock is free belongs to a launcher that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from client_pipeline.runtime.ray.private_ray import folder_with_room
from flower_app.launch.processes import RunProcesses

_PREFIX = "collapipe-"
_LOCK = ".lock"
_INSIDE = f"{_PREFIX}12345678/ray"
"""Place of Ray's files in a folder for temporary files: in a folder of ``mkdtemp``, and there in one of Ray's own."""


@contextlib.contextmanager
def folder_for_ray(parent: str | Path) -> Iterator[Path]:
    """Make a private folder in ``parent``, whose path marks the processes of a run, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(folder / f"{_LOCK}-new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The lock gets its name only once it is held.
        os.rename(folder / f"{_LOCK}-new", folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def end_abandoned_runs(parent: str | Path) -> None:
    """End the processes of this user's runs whose launcher was killed, and remove their folders."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        try:
            # Every user may write in a folder for temporary files: follow no link, and touch no other user's folder.
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                RunProcesses(str(folder)).end(polite_s=1.0)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def short_folder() -> str:
    """Find a folder for temporary files that leaves Ray room for the names of its sockets."""
    return folder_with_room(_INSIDE)
