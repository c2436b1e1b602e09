"""One process at a time runs in a run directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Hold a run directory while its run goes on.

    Yields
    ------
    The lock's descriptor: a process that inherits it holds the directory, too, should this one be killed.

    Raises
    ------
    ValueError
        If the run goes on already.
    """
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run_dir}: this run is still going; wait for its end, or end it first") from None
        yield file.fileno()
