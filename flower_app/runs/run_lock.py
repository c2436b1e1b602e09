"""Who may write: one command and one server app in a run directory, one run on a node.

All are ``flock`` locks: the system lets go of them when their holder ends, however it ends. The package filelock takes
none of them, nor that of Ray's folders in :mod:`flower_app.launch.ray_folders`: its release unlocks what child
processes have inherited, too, it has no shared lock to look with, and it leaves its file behind.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

COMMAND, SERVER = ".lock", ".server-lock"
_PROBES_S = 2.0
"""How long another process may look whether a lock is taken, at most."""


@contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Hold a run directory for a command while its run goes on.

    Yields
    ------
    The lock's descriptor: a process that inherits it holds the directory, too, should this one be killed.

    Raises
    ------
    ValueError
        If the run goes on already: under another command, or in a server app that has outlived its command.
    """
    with (run_dir / COMMAND).open("w") as file:
        if not _try_lock(file) or is_served(run_dir):
            raise _still_going(run_dir)
        yield file.fileno()


@contextmanager
def serving(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for the server app that writes it; ends with its process.

    Raises
    ------
    ValueError
        If another server app writes it.
    """
    with (run_dir / SERVER).open("a") as file:
        if not _try_lock(file, wait_s=_PROBES_S):
            raise _still_going(run_dir)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_served(run_dir: Path) -> bool:
    """Whether a server app writes the run directory now."""
    return server_process(run_dir) is not None


def server_process(run_dir: Path) -> int | None:
    """Id of the process that writes the run directory now; 0 if it has not said so yet, None if there is none."""
    try:
        with (run_dir / SERVER).open() as file:
            return None if _try_lock(file, fcntl.LOCK_SH) else int(file.read() or 0)
    except FileNotFoundError:
        return None


@contextmanager
def nodes_held(nodes: Sequence[int], run_dir: Path) -> Iterator[None]:
    """Hold nodes for a run: all server apps of a SuperLink are processes of one machine.

    Parameters
    ----------
    nodes : Flower's ids
    run_dir : the run's, for the message to another one

    Raises
    ------
    ValueError
        If another run holds one of them; the message names it.
    """
    folder = _nodes_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder}: belongs to another user; have it removed, or set TMPDIR to a folder of your own")
    with ExitStack() as held:
        remove_abandoned_nodes()
        for node in sorted(nodes):
            path = folder / str(node)
            file = held.enter_context(_removable_lock(path, _PROBES_S))
            if file is None:
                raise ValueError(
                    f"num-clusters: node {node} serves another run, {path.read_text(encoding='utf-8').strip()}; a node "
                    "serves one run at a time: wait until that run ends, or stop it first"
                )
            file.truncate(0)
            file.write(str(run_dir))
            file.flush()
        yield


def remove_abandoned_nodes() -> None:
    """Remove the files of nodes whose run was killed; those that somebody holds stay."""
    for path in _nodes_folder().glob("*"):
        with _removable_lock(path):
            pass


def _nodes_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"collapipe-nodes-{os.getuid()}"


@contextmanager
def _removable_lock(path: Path, wait_s: float = 0.0) -> Iterator[IO[str] | None]:
    """Take a lock whose file goes when it is released; None if another process holds it."""
    while True:
        with path.open("a", encoding="utf-8") as file:
            if not _try_lock(file, wait_s=wait_s):
                yield None
                return
            try:
                if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                    # Its last holder removed it between the two lines above.
                    continue
            except FileNotFoundError:
                continue
            try:
                yield file
            finally:
                path.unlink(missing_ok=True)
            return


def _try_lock(file: IO[str], kind: int = fcntl.LOCK_EX, wait_s: float = 0.0) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def _still_going(run_dir: Path) -> ValueError:
    server = server_process(run_dir)
    process = f" (its server app is process {server})" if server else ""
    return ValueError(f"{run_dir}: this run is still going{process}; wait until it ends, or stop it first")
