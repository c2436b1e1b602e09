"""Logs of a run: the files of ``logs/`` in its directory, and the lines that the watch page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LOGS = "logs"
RUN_LOG = "run.log"
"""Output of ``flwr run`` for a run on boxes."""
SIMULATION_LOG = "simulation.log"
"""Output of the server app and the client apps of a simulation."""
SUPERLINK_LOG = "superlink.log"
ERROR_LOG = "error.log"
"""Traceback of the error that ended the run."""
_MOST_LOG_BYTES = 1 << 16
_ESCAPES = re.compile(r"\x9b[0-?]*[ -/]*[@-~]|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Colours, cursor movements and titles."""
_OVERWRITTEN = re.compile(r"[^\r\n]*\r+(?=[^\r\n])")
"""Text that a terminal overwrites, such as a progress bar."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def newest_lines(run_dir: Path, offset: int, *, is_over: bool) -> dict[str, Any]:
    """Return the complete lines of the run's log after ``offset``, as a terminal would show them without colours.

    Parameters
    ----------
    run_dir : directory of the run
    offset : bytes that were read before; 0: the end of the log alone
    is_over : True once the log grows no more; its last line may then lack a line break

    Returns
    -------
    ``offset`` of the next call, and ``text``.
    """
    path = next((p for name in (RUN_LOG, SIMULATION_LOG) if (p := run_dir / LOGS / name).is_file()), None)
    if path is None:
        return {"offset": 0, "text": ""}
    size = path.stat().st_size
    begin = offset if 0 < offset <= size else max(size - _MOST_LOG_BYTES, 0)
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(_MOST_LOG_BYTES)
    if not is_over and len(data) < _MOST_LOG_BYTES:
        data = data[: data.rfind(b"\n") + 1]
    return {"offset": begin + len(data), "text": plain_text(data.decode(errors="replace"))}


def plain_text(text: str) -> str:
    """Return what a terminal shows of a text in the end, without colours."""
    return _CONTROLS.sub("", _OVERWRITTEN.sub("", _ESCAPES.sub("", text)))
