"""One process tells another of the same machine that there is something for it, which need not ask so often then."""

# Alone: the SuperNode's program has a thing of its own to say, and when.

from __future__ import annotations

import contextlib
import os
import select
import time


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


class GrowingPause:
    """Waits in a loop that looks for something: a part of what the loop has taken so far, up to what it asks for.

    Flower looks twice a second. What comes soon is seen soon, and what takes long is not looked for more often.
    """

    _LEAST_S, _PART = 0.05, 0.2
    _SAME_LOOP_S = 0.3
    """Between two waits of one loop there is less."""

    def __init__(self) -> None:
        self._since = self._last = float("-inf")

    def sleep(self, seconds: float) -> None:
        """Wait at most so long."""
        now = time.monotonic()
        if now - self._last > self._SAME_LOOP_S:
            self._since = now
        time.sleep(min(seconds, max(self._LEAST_S, self._PART * (now - self._since))))
        self._last = time.monotonic()
