"""Notes of a node on its rounds of a run, in one small file of its folder, for those who watch its machine.

The server has every round's line; the machine of a control unit has this. It is written when a round begins and when it
ends, and whoever reads it asks nobody.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from client_pipeline import durable

NOTES = "notes.json"


@dataclass(frozen=True, kw_only=True)
class RoundNotes:
    """Totals over a run's rounds on this node, and the newest of them."""

    rounds: int = 0
    """Rounds that were trained to their end."""
    failed: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    """Faults of all rounds that are over, by kind."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """By way: ``stream_up`` and ``stream_down`` (the decoder's stream), ``devices`` (between devices) [byte]."""
    newest: Mapping[str, Any] = field(default_factory=dict)
    """``round``, ``loss``, ``seconds``, and ``devices`` by number, of the round that was trained last."""
    under_way: Mapping[str, Any] = field(default_factory=dict)
    """``round``, the ``pid`` of who waits for it, and ``since`` [s, since 1970]; empty between rounds."""

    @property
    def is_in_round(self) -> bool:
        """Return whether a round goes on: its client app may have been killed, and the machine started again."""
        if not self.under_way:
            return False
        try:
            return psutil.Process(int(self.under_way["pid"])).create_time() <= float(self.under_way["since"])
        except psutil.Error:
            return False

    def begun(self, round_: int) -> RoundNotes:
        """Return the notes once a round has begun."""
        return replace(self, under_way={"round": round_, "pid": os.getpid(), "since": time.time()})

    def ended(self, report: Mapping[str, Any]) -> RoundNotes:
        """Return the notes once the round under way has ended by a control unit's report."""
        stream = report.get("stream_bytes") or {}
        ways = {f"stream_{way}": stream.get(way, 0) for way in ("up", "down")}
        ways["devices"] = report.get("link_bytes", 0)
        newest = {
            "round": self.under_way["round"],
            "loss": report.get("loss"),
            "seconds": time.time() - self.under_way["since"],
            "devices": {device: _spent(spent) for device, spent in (report.get("devices") or {}).items()},
        }
        counted = replace(self, rounds=self.rounds + 1, bytes=_sum(self.bytes, ways), newest=newest, under_way={})
        return counted.with_faults(report.get("faults") or ())

    def broken_off(self, error: BaseException) -> RoundNotes:
        """Return the notes once the round under way has failed."""
        counted = replace(self, failed=self.failed + 1, under_way={})
        return counted.with_faults(getattr(error, "faults", ()))

    def with_faults(self, faults: Any) -> RoundNotes:
        """Return the notes with a round's faults counted."""
        kinds: dict[str, int] = {}
        for fault in faults:
            kinds[str(fault["kind"])] = kinds.get(str(fault["kind"]), 0) + 1
        return replace(self, faults=_sum(self.faults, kinds))


def read_notes(folder: Path) -> RoundNotes:
    """Read a folder's notes; empty ones where there are none, or what a crash has left of them."""
    try:
        return RoundNotes(**json.loads((folder / NOTES).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return RoundNotes()


@contextmanager
def noted_round(folder: Path | None, round_: int) -> Iterator[dict[str, Any]]:
    """Note that a round goes on, and what has become of it.

    Parameters
    ----------
    folder : the node's, for the run; None: nothing is noted
    round_ : its number

    Yields
    ------
    Mapping that receives the entries of the control unit's report.
    """
    report: dict[str, Any] = {}
    notes = RoundNotes() if folder is None else read_notes(folder).begun(round_)
    _write(folder, notes)
    try:
        yield report
    except BaseException as error:
        _write(folder, notes.broken_off(error))
        raise
    _write(folder, notes if folder is None else notes.ended(report))


def _write(folder: Path | None, notes: RoundNotes) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_text(folder / NOTES, json.dumps(asdict(notes)), lasting=False)


def _spent(spent: Mapping[str, Any]) -> dict[str, Any]:
    # Not above: the programs that read notes stay in memory, and numpy is not for them.
    from flower_app.report.data import used_bytes

    used = used_bytes(spent)
    return {"blocks": spent.get("blocks"), "busy_s": spent.get("busy_s"), "bytes": used if used == used else None}


def _sum(total: Mapping[str, int], more: Mapping[str, Any]) -> dict[str, int]:
    return {key: int(total.get(key, 0)) + int(more.get(key, 0)) for key in (*total, *more)}
