"""One start of a machine's programs at a time; the next start cleans up after one that was killed.

A service manager ends all programs of a unit itself. Elsewhere ``kill -9`` leaves the programs running.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from client_pipeline.runtime.ray.ray_folder import short_folder
from flower_app.launch.processes import RunProcesses

_NOTE = "running.json"


@contextlib.contextmanager
def sole_start(state: Path, mark: str) -> Iterator[Path]:
    """Hold a machine's state folder; end the programs and remove the files of a start that was killed.

    Parameters
    ----------
    state : folder of the machine's state; made if it is not there
    mark : in the environment of all programs of this start

    Yields
    ------
    A new folder with a short path, for sockets and logs. The caller removes what it puts there.

    Raises
    ------
    ValueError
        If another start holds the folder.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = state / _NOTE
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--state: expected a folder of this machine alone, found {state}, which another collapipe uses; "
                "end that one, or give this one another folder"
            ) from None
        if note.is_file():
            killed = json.loads(note.read_text(encoding="utf-8"))
            RunProcesses(killed["mark"]).end()
            shutil.rmtree(killed["folder"], ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="collapipe-", dir=short_folder()))
        note.write_text(json.dumps({"mark": mark, "folder": str(folder)}), encoding="utf-8")
        try:
            yield folder
        finally:
            note.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
