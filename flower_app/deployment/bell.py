"""One process tells another of the same machine that there is something for it, which need not ask so often then."""

from __future__ import annotations

import contextlib
import os
import select


class Bell:
    """Made before a fork, it is there on both sides of it: what one rings, the other hears.

    Rung when nobody waits, it is heard by the next who does; rung twice, it is heard once.
    """

    def __init__(self) -> None:
        self._heard, self._rung = os.pipe()
        for end in (self._heard, self._rung):
            os.set_blocking(end, False)

    def ring(self) -> None:
        """Wake whoever waits."""
        # With thousands of bytes that nobody has read it has been rung.
        with contextlib.suppress(BlockingIOError):
            os.write(self._rung, b".")

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is rung; returns whether it was."""
        if not select.select([self._heard], [], [], seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._heard, 1 << 16)
        return True
