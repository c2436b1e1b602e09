"""Registrar of the edge server: the SuperLink's register follows the folder, without a restart.

``python -m flower_app.joining.registrar CONTROL FOLDER (ask | approve)``. With ``approve`` every box that shows a good
code is approved, and nobody is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flower_app.deployment.edge_server import register_supernodes
from flower_app.joining import approval
from flower_app.joining.join_folder import JoinFolder

_POLL_S = 1.0
_AFTER_ERROR_S = 5.0


def approve_waiting(folder: JoinFolder, say: Callable[[str], None], reported: set[str] | None = None) -> None:
    """Approve every box that waits; report each obstacle once."""
    reported = set() if reported is None else reported
    for box, reason in approval.approve_waiting(folder):
        if not reason:
            warning = approval.shared_address_warning(folder, box)
            say(f"{box.name} has joined: {box.box_id}" + (f"\n{warning}" if warning else ""))
        elif (line := f"{box.box_id} is not let in: {reason}") not in reported:
            reported.add(line)
            say(line)


def trusted_state(folder: JoinFolder) -> dict[str, bytes]:
    """Return the files that decide which SuperNodes may connect, by name."""
    files = [*sorted(folder.server.supernodes.glob("*.pub")), folder.server.revoked_keys]
    return {path.name: path.read_bytes() for path in files if path.is_file()}


def main() -> None:
    """Follow the folder until told to end."""
    control, root, how = sys.argv[1:]
    folder = JoinFolder(Path(root))
    # The folder may have changed since the edge server registered its keys.
    registered: dict[str, bytes] = {}
    reported: set[str] = set()
    while True:
        if how == "approve":
            approve_waiting(folder, _say, reported)
        if (state := trusted_state(folder)) != registered:
            try:
                register_supernodes(control, folder.server, os.environ, _say)
                registered = state
            except (ValueError, subprocess.TimeoutExpired) as error:
                _say(f"warning: {error}")
                time.sleep(_AFTER_ERROR_S)
        time.sleep(_POLL_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
