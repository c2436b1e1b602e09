"""Ends the programs of a machine when ``collapipe up`` cannot: after ``kill -9``, or where memory ran out.

``collapipe up`` holds the other end of this process's standard input, and nobody else does. When the system closes it,
the command is gone, whatever ended it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flower_app.launch.processes import MARK, RunProcesses


def start_guard(environment: Mapping[str, str], temporary: Sequence[Path] = ()) -> subprocess.Popen[bytes]:
    """Start the guard of this process.

    Parameters
    ----------
    environment : of the programs; has the mark that they are found by
    temporary : folders that are removed once the programs have ended
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "flower_app.deployment.box_guard", str(os.getpid()), *map(str, temporary)],
        env=dict(environment),
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def main() -> None:
    """Wait for the end of the process whose id is the first argument, and end its programs; folders follow."""
    box, *temporary = sys.argv[1:]
    processes = RunProcesses(os.environ[MARK], int(box))
    sys.stdin.buffer.read()
    processes.end()
    for folder in temporary:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
