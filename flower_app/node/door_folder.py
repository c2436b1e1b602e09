"""Folder in which a control unit's client app and its door tell each other what is to be served.

The client app has no long life, and the door has no connection to the server: what is given stays on the box's disk. So
a door that is started again answers with the same model, whether the server is there or not.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.documents import json_value

_ORDER, _STATUS = "order.json", "status.json"


class DoorFolder:
    """What a door is to serve, and what became of it.

    Parameters
    ----------
    folder : of the door, in the box's state; the model lies in it as in a run directory
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def order(self) -> dict[str, Any]:
        """Return the order: ``id``, ``name`` of the model, ``config``, ``state`` of the cluster; empty: none."""
        return _read(self.folder / _ORDER)

    def give(self, order: Mapping[str, Any]) -> str:
        """Order the door to serve the model that lies in the folder; returns the order's id."""
        number = secrets.token_hex(8)
        durable.write_text(self.folder / _ORDER, json.dumps({**order, "id": number}))
        return number

    def withdraw(self) -> None:
        """Let the door close."""
        durable.disk.remove(self.folder / _ORDER)

    def tell(self, number: str, *, address: str = "", error: str = "") -> None:
        """Note what became of an order: the address of the door, or why it is not open."""
        text = json.dumps({"id": number, "address": address, "error": error})
        durable.write_text(self.folder / _STATUS, text, lasting=False)

    def status(self, number: str) -> dict[str, Any]:
        """Return ``address`` or ``error`` of an order; empty: nothing is known yet."""
        status = _read(self.folder / _STATUS)
        return status if status.get("id") == number else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json_value(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return dict(value) if isinstance(value, dict) else {}
