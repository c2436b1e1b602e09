"""Texts of errors: a user's mistake in its own words, anything unexpected with its type and place."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

_PACKAGES = ("client_pipeline", "strategies", "flower_app")
_PATH_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.EROFS)


def error_text(error: BaseException, log: Path | str = "") -> str:
    """Describe an error in one line; ``log``, which has its traceback, is named if the error is unexpected.

    Messages that our own code raises as ``ValueError``, ``FileNotFoundError`` or ``RuntimeError`` are sentences, and
    stand alone. The text of any other, such as the ``1`` of a missing key, says nothing by itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if _package_path(frame.filename)]
    message = str(error)
    # A raise line outside libraries has a sentence of ours.
    is_ours = not frames or (
        ("site-packages" not in frames[-1].filename or bool(_package_path(frames[-1].filename)))
        and (frames[-1].line or "").startswith("raise ")
    )
    if message and (isinstance(error, ValueError | FileNotFoundError) or (isinstance(error, RuntimeError) and is_ours)):
        return message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if places:
        text += f", in {_package_path(places[-1].filename)}, line {places[-1].lineno}"
    return f"{text}; see {log}" if log else text


def mistake_text(error: Exception) -> str:
    """Describe a user's mistake in one line; empty for an error that is none.

    A path that cannot be read or written is one; a disk that is full or broken is none.
    """
    if not isinstance(error, ValueError | OSError):
        return ""
    if isinstance(error, OSError) and error.filename is not None:
        is_path = isinstance(error, _PATH_ERRORS) or error.errno in _PATH_ERRNOS
        return f"{error.filename}: {error.strerror}; check the path, or give another" if is_path else ""
    return str(error) if isinstance(error, ValueError | FileNotFoundError) else ""


def full_disk_text(error: Exception) -> str:
    """Say in one line that a disk is full, or a quota; empty for another error."""
    if not isinstance(error, OSError) or error.errno not in _FULL_ERRNOS:
        return ""
    path = f"{error.filename}: " if error.filename is not None else ""
    return f"{path}{error.strerror}; make room there, or give another folder (runs-dir, TMPDIR)"


def _package_path(file: str) -> str:
    """A file's path from our package on; empty for other people's files."""
    parts = Path(file).parts
    starts = [i for i, part in enumerate(parts[:-1]) if part in _PACKAGES]
    return "/".join(parts[starts[-1] :]) if starts else ""
