"""Files of faults in a control unit's folder: those injected into it, and those that it has recorded.

``injected.jsonl`` gets a line before each fault that is injected, to be compared with the records of the rounds.
``faults.json`` has the records of the round in progress, and the devices that give no sign of life. Both outlive a
control unit that is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.link.cluster_news import LifeSign
from client_pipeline.runtime.transport.faults import FaultRecord

INJECTED = "injected.jsonl"
_KEPT = "faults.json"


def note_injected(folder: Path | None, kind: str, round_: int, **indices: int | None) -> None:
    """Add a line to ``injected.jsonl``, with the time [s, since 1970]; the fault itself comes after it.

    Parameters
    ----------
    folder : of the file; None: nowhere
    kind, round_ : of the fault
    indices : ``cluster``, ``device``, ``step``, as far as they mean something
    """
    if folder is None:
        return
    line = json.dumps({"kind": kind, "round": round_, **indices, "time": time.time()})
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / INJECTED).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_injected(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``injected.jsonl``; none where there is no file."""
    path = folder / INJECTED
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def keep(folder: Path | None, round_: int, faults: Sequence[FaultRecord], signs: Sequence[LifeSign] = ()) -> None:
    """Write the records of the round in progress, in place of those that were there.

    Parameters
    ----------
    folder : of the file; None: nowhere
    round_, faults : the round, and its records so far
    signs : devices that give no sign of life
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    missing = [{"device": sign.device, "state": sign.state, "since": now - sign.seconds} for sign in signs]
    text = json.dumps({"round": round_, "faults": [fault.to_dict() for fault in faults], "signs": missing})
    # No sync: a killed process loses nothing by that, and a machine that fails loses the round anyway.
    durable.write_text(folder / _KEPT, text, lasting=False)


def forget(folder: Path) -> None:
    """Remove what another run of the same name has left."""
    for name in (INJECTED, _KEPT):
        durable.remove(folder / name)


def recorded_faults(folder: Path, round_: int) -> list[dict[str, Any]]:
    """Return what a control unit had recorded in a round before it was lost, as JSON values."""
    return list(_of_round(folder, round_)["faults"])


def recorded_signs(folder: Path, round_: int) -> list[dict[str, Any]]:
    """Return the devices that give no sign of life in a round: ``device``, ``state``, ``since`` [s, since 1970]."""
    return list(_of_round(folder, round_)["signs"])


def _of_round(folder: Path, round_: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"faults": [], "signs": []}
    try:
        document = json.loads((folder / _KEPT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return nothing
    return nothing | document if document["round"] == round_ else nothing
