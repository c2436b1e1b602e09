"""Writing of the files that a run continues from: after a crash a file or folder is complete, or absent.

A write goes aside, is synced, and gets its name in one step; the folder is synced after it. All operations are those
of :class:`Disk`, so that tests can record them, cut the record anywhere, and let any of them fail.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread

FileWriter = Callable[[Path], object]
"""Writes a new file at a path."""


class Disk:
    """Operations on files, one system call or one file's content each."""

    def fill(self, path: Path, write: FileWriter) -> None:
        """Have a new file written; nothing of it need be on the disk before :meth:`sync`."""
        write(path)

    def append(self, path: Path, data: bytes) -> None:
        """Add to the end of a file; as for :meth:`fill`."""
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to a size [byte]."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Have a file's content, or a folder's names, on the disk before this returns."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file, link or folder another name in the same folder, in one step."""
        os.replace(path, target)

    def link(self, path: Path, target: str) -> None:
        """Make a symbolic link."""
        path.symlink_to(target)

    def make_folder(self, path: Path) -> None:
        """Make a folder."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with all that it holds; no error if it is not there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


disk = Disk()
"""The disk that everything is written to."""


def paths_of_rounds(folder: Path, suffix: str = "") -> dict[int, Path]:
    """Return the files or folders ``round-000007`` in a folder by their number, in its order."""
    names = re.compile(r"round-(\d{6,})" + re.escape(suffix))
    matches = ((names.fullmatch(path.name), path) for path in folder.glob("round-*"))
    return dict(sorted((int(match.group(1)), path) for match, path in matches if match))


def write_file(path: Path, write: FileWriter, *, lasting: bool = True, mode: int = 0o644) -> Path:
    """Write a file in one step; one that is there is replaced.

    Parameters
    ----------
    path : the file
    write : writes it at the path that it is given
    lasting : whether it has to survive a machine that fails; else it only is never seen by half
    mode : its permissions
    """
    temporary_file = _temporary_path(path)
    try:
        disk.fill(temporary_file, write)
        os.chmod(temporary_file, mode)
        if lasting:
            disk.sync(temporary_file)
        disk.rename(temporary_file, path)
    except BaseException as error:
        disk.remove(temporary_file)
        if isinstance(error, OSError) and error.filename in (None, str(temporary_file)):
            # The user does not know the temporary name, and a full disk names no file at all.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if lasting:
        disk.sync(path.parent)
    return path


def write_text(path: Path, text: str, *, lasting: bool = True) -> Path:
    """Write a text file in one step; see :func:`write_file`."""
    return write_file(path, lambda aside: aside.write_text(text, encoding="utf-8"), lasting=lasting)


def write_folder(folder: Path, files: Mapping[str, FileWriter]) -> Path:
    """Write a folder of files in one step; a folder of that name goes first."""
    temporary_folder = _temporary_path(folder)
    try:
        disk.make_folder(temporary_folder)
        for name, write in files.items():
            disk.fill(temporary_folder / name, write)
            os.chmod(temporary_folder / name, 0o644)
            disk.sync(temporary_folder / name)
        disk.sync(temporary_folder)
        if folder.is_dir():
            remove(folder)
        disk.rename(temporary_folder, folder)
    except BaseException:
        disk.remove(temporary_folder)
        raise
    disk.sync(folder.parent)
    return folder


def make_folders(folder: Path) -> Path:
    """Make a folder and those above it, as far as they are not there."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        try:
            disk.make_folder(path)
        except FileExistsError:
            # Another control unit made it just now.
            continue
        disk.sync(path.parent)
    return folder


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that :func:`adopt_folder` cannot put in its place.

    Raises
    ------
    ValueError
        If it holds something, or cannot be replaced by another one.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is there already; give a folder that does not exist or is empty")
    if os.path.ismount(folder) or folder.resolve() == Path.cwd():
        raise ValueError(
            f"{folder}: is the working directory or a mounted disk, which no other folder can replace; give one that "
            "does not exist"
        )


def check_not_input(option: str, out: Path, *inputs: Path) -> None:
    """Refuse to write a file over one of its inputs, also under another name.

    Parameters
    ----------
    option : that names ``out``, for the message
    out : is written
    inputs : are read; those that are not there are none

    Raises
    ------
    ValueError
        Naming both.
    """
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise ValueError(f"{option}: {out}: is the file that is read, {path}; name another, for it would be lost")


def adopt_folder(temporary_folder: Path, folder: Path) -> Path:
    """Rename a folder beside it to a folder that is absent or empty, in one step."""
    for path in (*temporary_folder.rglob("*"), temporary_folder):
        disk.sync(path)
    disk.rename(temporary_folder, folder)
    disk.sync(folder.parent)
    return folder


def append_text(path: Path, text: str) -> None:
    """Add to a text file; a text that does not fit on the disk leaves the file as it was."""
    is_new = not path.exists()
    size = 0 if is_new else path.stat().st_size
    try:
        disk.append(path, text.encode("utf-8"))
        disk.sync(path)
    except OSError:
        if path.exists():
            disk.truncate(path, size)
        raise
    if is_new:
        disk.sync(path.parent)


def truncate(path: Path, size: int) -> None:
    """Cut a file to a size [byte]."""
    disk.truncate(path, size)
    disk.sync(path)


def point(link: Path, target: str) -> None:
    """Let a symbolic link point to ``target``, in one step."""
    temporary_link = _temporary_path(link)
    try:
        disk.link(temporary_link, target)
        disk.rename(temporary_link, link)
    except BaseException:
        disk.remove(temporary_link)
        raise
    disk.sync(link.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; a folder is no longer seen under its name once its first file goes."""
    if path.is_dir() and not path.is_symlink():
        temporary_path = _temporary_path(path)
        disk.rename(path, temporary_path)
        path = temporary_path
    disk.remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what a process that was killed has left aside."""
    for leftover in folder.glob(".*.aside-*"):
        disk.remove(leftover)


_DIGEST_BYTES = 8 << 20
"""Read at a time: between reads a thread waits for the others' turns, and a large file has many."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), bytearray(_DIGEST_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def file_identity(path: Path) -> tuple[int, ...]:
    """Return device, number, size and time of change: they stay as long as the file does."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def begin_digest(path: Path) -> Future[str]:
    """Compute a file's SHA-256 in a thread, once in a process as long as the file does not change."""
    key = (path.resolve(), file_identity(path))
    with _LOCK:
        if key not in _DIGESTS:
            _DIGESTS[key] = digest = Future[str]()
            Thread(target=_compute, args=(key, digest), daemon=True, name="digest").start()
        return _DIGESTS[key]


def checked_digest(path: Path) -> str:
    """Return the digest of :func:`begin_digest`, once it is there."""
    return begin_digest(path).result()


_LOCK = Lock()
_DIGESTS: dict[tuple[Path, tuple[int, ...]], Future[str]] = {}


def _compute(key: tuple[Path, tuple[int, ...]], digest: Future[str]) -> None:
    try:
        digest.set_result(file_digest(key[0]))
    except Exception as error:  # noqa: BLE001 (whoever waits is told, whatever it is)
        # Whoever asks again reads again.
        with _LOCK:
            del _DIGESTS[key]
        digest.set_exception(error)


def _temporary_path(path: Path) -> Path:
    # In a shared folder, another user could place a link under a name that can be guessed.
    return path.with_name(f".{path.name}.aside-{secrets.token_hex(8)}")
