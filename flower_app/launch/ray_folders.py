"""Clean-up after runs that were killed: their processes, and the folders of their Ray.

The launcher of a run holds the lock of its folder. A folder whose lock is free belongs to a launcher that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from client_pipeline.runtime.ray.ray_folder import LOCK, PREFIX, is_private_folder
from flower_app.launch.processes import RunProcesses


def end_abandoned_runs(parent: str | Path) -> None:
    """End the processes of this user's runs whose launcher was killed, and remove their folders."""
    for folder in Path(parent).glob(f"{PREFIX}*"):
        if not is_private_folder(folder):
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # It is a folder of something else, such as a run directory.
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                RunProcesses(str(folder)).end(polite_s=1.0)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
