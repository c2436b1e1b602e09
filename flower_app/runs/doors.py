"""Doors at which boxes answer with a run's model: what its directory and the terminal say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVE_FOLDER = "serve"
"""Folder of a run directory with the logs and the outcome of the last order to its boxes."""


def door_line(door: Mapping[str, Any]) -> str:
    """Return a line about a box's door."""
    if error := door.get("error"):
        return f"warning: {error}"
    return f"cluster {door['cluster']}: " + ("its door is closed" if door.get("closed") else f"door {door['door']}")
