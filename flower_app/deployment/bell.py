"""One process tells another of the same machine that there is something for it, which need not ask so often then."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_UNASKED_S = 5.0
"""How often a SuperExec asks for work of which nobody has told it [s]."""
_PART_S = 0.5
"""How long a signal of another thread may go unnoticed [s]: Flower's programs end so when their parent has gone."""


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
        deadline = time.monotonic() + seconds
        # In parts: a signal that another thread has raised is seen in between.
        while not select.select([self._heard], [], [], max(0.0, min(_PART_S, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._heard, 1 << 16)
        return True


def when_told(work: Bell, loop: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Have a SuperExec ask for work when there is some, and seldom besides; Flower's asks every second.

    Each time takes ten milliseconds of the SuperLink's or SuperNode's processor, and half as much of its own.

    Parameters
    ----------
    work : rung when there is some
    loop : Flower's module that waits in between
    run : the SuperExec, and what is returned
    """
    is_told = False

    def wait(seconds: float) -> None:
        nonlocal is_told
        # It takes one thing at a time, and there may have been two.
        is_told = work.wait(seconds if is_told else max(seconds, _UNASKED_S))

    loop.time = SimpleNamespace(sleep=wait)
    return run
