"""``rounds.jsonl`` for whoever reads it while a run goes on: a resumed run takes back what no checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from flower_app.runs.run_directory import ROUNDS, read_rounds

_TAIL_BYTES = 4096


class NewRounds(NamedTuple):
    """What has changed since the last look."""

    kept: int
    """Rounds of those before that still count."""
    lines: list[dict[str, Any]]
    """Rounds after these."""


class FollowedRounds:
    """Reads what is added to the rounds of a run.

    Parameters
    ----------
    run_dir : of a run that goes on, or has ended
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._digests: list[str] = []
        """Of each round's line."""
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
