"""The edge server's side of an approval: the SuperLink's register follows the folder, without a restart.

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
from flower_app.joining.approval import approve_box
from flower_app.joining.join_folder import WAITING, JoinFolder

_POLL_S = 1.0
_AFTER_ERROR_S = 5.0


def approve_waiting(folder: JoinFolder, say: Callable[[str], None]) -> None:
    """Approve every box that waits; a device waits for its control unit."""
    waiting = [box for box in folder.boxes() if box.status == WAITING]
    for box in sorted(waiting, key=lambda box: not box.is_control_unit):
        try:
            say(f"{approve_box(folder, box.box_id).name} has joined: {box.box_id}")
        except ValueError:
            # Its cluster's control unit may come yet; collapipe approve says what is in the way.
            continue


def trusted_state(folder: JoinFolder) -> dict[str, bytes]:
    """Everything that decides which SuperNodes may connect."""
    files = [*sorted(folder.server.supernodes.glob("*.pub")), folder.server.revoked_keys]
    return {path.name: path.read_bytes() for path in files if path.is_file()}


def main() -> None:
    """Follow the folder until told to end."""
    control, root, how = sys.argv[1:]
    folder = JoinFolder(Path(root))
    # What the edge server has registered when it started may have changed since: it is looked at once more.
    registered: dict[str, bytes] = {}
    while True:
        if how == "approve":
            approve_waiting(folder, _say)
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
