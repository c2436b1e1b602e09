"""Reading ``rounds.jsonl`` while a run goes on: a resumed run takes back what no checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flower_app.runs.run_directory import ROUNDS, read_rounds

_TAIL_BYTES = 4096
_RECENT = 10
"""Rounds over which the time of one is averaged."""


class NewRounds(NamedTuple):
    """Rounds added or changed since the last look."""

    kept: int
    """Rounds of those before that still count."""
    lines: list[dict[str, Any]]
    """Rounds after these."""


class FollowedRounds:
    """Reader of what is added to the rounds of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._digests: list[str] = []
        """Digest of each round's line."""
        self._offset = 0
        self._tail = b""
        """The bytes before the offset: others stand there once the file was cut and has grown again."""

    def read(self) -> NewRounds:
        """Read the complete lines that are new; those that replace others, too, where some were taken back.

        Raises
        ------
        ValueError
            If a line is no JSON object; the message names the file and the line's beginning.
        """
        was_cut = self._tail_before(self._offset) != self._tail
        lines, end = read_rounds(self._run_dir, 0 if was_cut else self._offset)
        digests = [hashlib.sha256(json.dumps(line).encode()).hexdigest() for line in lines]
        kept = len(self._digests)
        if was_cut:
            pairs = enumerate(zip(self._digests, digests, strict=False))
            kept = next((i for i, (old, new) in pairs if old != new), min(len(self._digests), len(digests)))
            lines, digests = lines[kept:], digests[kept:]
        self._digests = self._digests[:kept] + digests
        self._offset, self._tail = end, self._tail_before(end)
        return NewRounds(kept, lines)

    def _tail_before(self, end: int) -> bytes:
        try:
            with (self._run_dir / ROUNDS).open("rb") as file:
                file.seek(max(end - _TAIL_BYTES, 0))
                return file.read(min(end, _TAIL_BYTES))
        except FileNotFoundError:
            return b""


def seconds_left(rounds: Sequence[Mapping[str, Any]], num_rounds: int) -> float:
    """Return the expected time to the end of the last round [s]; 0 where it is not known, or no round is left."""
    # In the first round everything is set up.
    recent = [float(record["round_s"]) for record in rounds[1:][-_RECENT:] if record.get("round_s")]
    return sum(recent) / len(recent) * max(num_rounds - int(rounds[-1]["round"]), 0) if recent else 0.0
