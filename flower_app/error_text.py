"""What is said of an error: a mistake of the user's in its own words, anything unexpected with its type and place."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

_PACKAGES = ("client_pipeline", "strategies", "flower_app")
_PATH_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.EROFS)


def error_text(error: BaseException, log: Path | str = "") -> str:
    """Describe an error in one line.

    Messages that our own code raises as ``ValueError``, ``FileNotFoundError`` or ``RuntimeError`` are sentences, and
    stand alone. The text of any other, such as the ``1`` of a missing key, says nothing by itself.

    Parameters
    ----------
    error : was caught
    log : file with its traceback; named if the error is unexpected
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if _package_path(frame.filename)]
    message = str(error)
    if message and (
        isinstance(error, ValueError | FileNotFoundError)
        or (isinstance(error, RuntimeError) and _is_deliberate(frames))
    ):
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


def _is_deliberate(frames: traceback.StackSummary) -> bool:
    """Whether the error was raised by a line that says so, and not within a library."""
    if not frames:
        return True
    last = frames[-1]
    library = "site-packages" in last.filename and not _package_path(last.filename)
    return not library and (last.line or "").startswith("raise ")


def _package_path(file: str) -> str:
    """A file's path from our package on; empty for other people's files."""
    parts = Path(file).parts
    starts = [i for i, part in enumerate(parts[:-1]) if part in _PACKAGES]
    return "/".join(parts[starts[-1] :]) if starts else ""
