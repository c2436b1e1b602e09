"""Locks: one command and one server app write in a run directory; one run trains on a node.

All are ``flock`` locks: the system lets go of them when their holder ends, however it ends. The package filelock takes
none of them: it has no shared lock to look with, and it leaves its file behind.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

COMMAND, SERVER = ".lock", ".server-lock"
_NODES = "collapipe-nodes"
"""Folder of the nodes' locks, in the home of the SuperLink that they are connected to."""
_PROBES_S = 2.0
"""Longest time that another process may probe a lock [s]."""
_SCRATCH = "flower"
"""A run's programs' own folder: it is removed and made anew, and has links to the packages."""
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def check_readable(run_dir: Path) -> None:
    """Refuse a run directory on which a reader would wait or read without an end; its programs' own folder is not read.

    Linked folders are looked at like others, each once.
    """
    folders, seen = [run_dir], {(run_dir / _SCRATCH).resolve()}
    while folders:
        folder = folders.pop()
        if (place := folder.resolve()) in seen:
            continue
        seen.add(place)
        try:
            paths = list(folder.iterdir())
        except OSError:
            # It has gone, or nobody can read it here.
            continue
        for path in paths:
            try:
                mode = path.stat().st_mode
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{path}: expected a file or folder, found {error.strerror}; remove it") from error
            if stat.S_ISDIR(mode):
                folders.append(path)
            elif not stat.S_ISREG(mode):
                kind = _KINDS.get(stat.S_IFMT(mode), "a device")
                raise ValueError(f"{path}: expected a file or folder, found {kind}; remove it")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for a command while its run goes on.

    Raises
    ------
    ValueError
        If the run goes on already: under another command, or in a server app that has outlived its command.
    """
    with guarded_file(run_dir / COMMAND) as file:
        if not _try_lock(file) or is_served(run_dir):
            raise _still_going(run_dir)
        yield


@contextmanager
def serving(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for the server app that writes it; ends with its process.

    Raises
    ------
    ValueError
        If another server app writes it.
    """
    with guarded_file(run_dir / SERVER) as file:
        if not _try_lock(file, wait_s=_PROBES_S):
            raise _still_going(run_dir)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_served(run_dir: Path) -> bool:
    """Tell whether a server app writes the run directory now."""
    return server_process(run_dir) is not None


def server_process(run_dir: Path) -> int | None:
    """Id of the process that writes the run directory now; 0 if it has not said so yet, None if there is none."""
    try:
        with guarded_file(run_dir / SERVER, os.O_RDONLY) as file:
            return None if _try_lock(file, fcntl.LOCK_SH) else int(file.read(20) or 0)
    except FileNotFoundError:
        return None


def refuse_foreign_files(run_dir: Path) -> None:
    """Refuse to write in a run directory that has links, pipes or files of another user.

    The link ``model`` to a version in ``models`` is a run's own.
    """
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder), *(Path(folder, name) for name in (*folders, *files))):
            try:
                status = path.lstat()
                version = path.readlink() if stat.S_ISLNK(status.st_mode) else None
            except FileNotFoundError:
                # A run that still goes on has removed it.
                continue
            if path != run_dir / "model" or version is None or version.parts[:-1] != ("models",):
                _refuse_foreign(path, status, stat.S_IFREG, stat.S_IFDIR)
        if Path(folder) == run_dir and _SCRATCH in folders:
            folders.remove(_SCRATCH)


@contextmanager
def nodes_held(nodes: Sequence[int], run_dir: Path) -> Iterator[None]:
    """Hold nodes for a run: all server apps of a SuperLink are processes of one machine.

    Raises
    ------
    ValueError
        If another run holds one of them; the message names it.
    """
    # All server apps of a SuperLink have its home, and no other user writes there, as in a folder for temporary files.
    folder = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / _NODES
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own_folder(folder)
    with ExitStack() as held:
        for path in folder.iterdir():
            # A lock that no process holds is left by a killed run.
            with _removable_lock(path):
                pass
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


def check_own_folder(folder: Path) -> None:
    """Refuse a link, and a folder that another user has made or may write in."""
    status = folder.lstat()
    _refuse_foreign(folder, status, stat.S_IFDIR)
    if status.st_mode & 0o022:
        raise ValueError(
            f"{folder}: expected mode 700, found {status.st_mode & 0o777:o}; take it from others: chmod 700 {folder}"
        )


def guarded_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> IO[str]:
    """Open a lock's or key's file as it is: through no link, without emptying it, and without waiting at a pipe.

    Raises
    ------
    ValueError
        If it is a link, no regular file, or of another user.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        # It may be a link, a folder or a socket.
        if path.is_symlink() or path.exists():
            _refuse_foreign(path, path.lstat(), stat.S_IFREG)
        raise
    try:
        _refuse_foreign(path, os.fstat(descriptor), stat.S_IFREG)
    except ValueError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r", encoding="utf-8")


def _refuse_foreign(path: Path, status: os.stat_result, *kinds: int) -> None:
    """Refuse what is of another kind, or of another user but root."""
    expected = f"{path}: expected {' or '.join(_KINDS[kind] for kind in kinds)} of your own"
    if (kind := stat.S_IFMT(status.st_mode)) not in kinds:
        raise ValueError(f"{expected}, found {_KINDS.get(kind, 'a device')}; remove it")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{expected}, found one of user {status.st_uid}; use a copy of your own (cp -r), or remove it")


@contextmanager
def _removable_lock(path: Path, wait_s: float = 0.0) -> Iterator[IO[str] | None]:
    """Take a lock whose file goes when it is released; None if another process holds it."""
    while True:
        with guarded_file(path) as file:
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
