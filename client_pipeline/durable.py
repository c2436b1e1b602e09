"""The one door to the disk for what a run goes on from: after a crash a file or folder is there whole, or not at all.

A write goes aside, is synced, and gets its name in one step; the folder is synced after it. All operations are those
of :class:`Disk`, so that tests can record them, cut the record anywhere, and let any of them fail.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

FileWriter = Callable[[Path], object]
"""Writes a new file at a path."""

_numbers = itertools.count()


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
"""Where everything goes."""


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
        if isinstance(error, OSError) and str(error.filename) == str(temporary_file):
            # What lies aside is a name that nobody has given.
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


def adopt_folder(temporary_folder: Path, folder: Path) -> Path:
    """Give a folder of files that lies beside it the name of one that is not there, or empty, in one step."""
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


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.aside-{os.getpid()}-{next(_numbers)}")
