"""One start of a machine's programs at a time; the next start cleans up after one that failed or was killed.

A service manager ends all programs of a unit itself. Elsewhere ``kill -9`` leaves the programs running.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from client_pipeline import durable
from client_pipeline.documents import json_value
from client_pipeline.runtime.ray.ray_folder import PREFIX, is_private_folder, short_folder
from flower_app.launch.processes import RunProcesses
from flower_app.runs.run_lock import check_own_folder, guarded_file

_NOTE = "running.json"


@contextlib.contextmanager
def sole_start(state: Path, mark: str, say: Callable[[str], None]) -> Iterator[Path]:
    """Hold a machine's state folder; end the programs and remove the files of a start that was killed.

    Parameters
    ----------
    state : folder of the machine's state; made if it is not there
    mark : in the environment of all programs of this start
    say : called with a line where the note of the last start cannot be read

    Yields
    ------
    A new private folder with a short path, for sockets and logs. What the caller leaves there, the next start removes.

    Raises
    ------
    ValueError
        If another start holds the folder, or another user can write in it.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own_folder(state.resolve())
    note = state / _NOTE
    with guarded_file(state / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--state: expected a folder of this machine alone, found {state}, which another collapipe uses; "
                "end that one, or give this one another folder"
            ) from None
        _end_killed(note, say)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short_folder()))
        try:
            durable.write_text(note, json.dumps({"mark": mark, "folder": str(folder)}))
            yield folder
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
            # Logs that stay are there until the next start, which removes what the note names.
            if not folder.exists():
                note.unlink(missing_ok=True)


def _end_killed(note: Path, say: Callable[[str], None]) -> None:
    """End the programs and remove the folder that a note names, if there is a note."""
    try:
        with guarded_file(note, os.O_RDONLY):
            data = note.read_bytes()
    except FileNotFoundError:
        return
    try:
        killed = json_value(data)
        mark, folder = str(killed["mark"]), Path(killed["folder"])
    except (ValueError, LookupError, TypeError):
        say(f"warning: {note}: expected the programs of the last start, found {data[:40]!r}; end any that still run")
        return
    RunProcesses(mark).end()
    if is_private_folder(folder):
        shutil.rmtree(folder, ignore_errors=True)
