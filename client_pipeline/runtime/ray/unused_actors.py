"""End of the process of actors that receive no calls any more: they outlive the message that made them."""

from __future__ import annotations

import os
import threading
import time
import weakref

import ray

LIVENESS = "liveness"
"""Ray concurrency group of the methods that an actor answers at once, whatever else it does."""

_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()
_STARTED = threading.Lock()
_LONGEST_SLEEP_S = 5.0


class Watch:
    """Watch over the calls of an actor. The process ends when all of its actors have been idle for long enough.

    A process that Ray did not start, as that of a test or a notebook, is left alone.

    Parameters
    ----------
    idle_s : longest time without a call [s]
    """

    def __init__(self, idle_s: float) -> None:
        self._called_at = time.monotonic()
        self._idle_s = idle_s
        self._busy = 0
        if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            _WATCHES.add(self)
            if _STARTED.acquire(blocking=False):
                threading.Thread(target=_end_when_idle, daemon=True, name="idle-watch").start()

    @property
    def busy(self) -> bool:
        """True while a call goes on."""
        return self._busy > 0

    @property
    def left_s(self) -> float:
        """Time left without a call [s]; 0 when it is over."""
        return self._idle_s if self._busy else max(self._called_at + self._idle_s - time.monotonic(), 0.0)

    def __enter__(self) -> Watch:
        self._busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._busy -= 1
        self._called_at = time.monotonic()


def _end_when_idle() -> None:
    while left_s := max((watch.left_s for watch in list(_WATCHES)), default=0.0):
        time.sleep(min(left_s, _LONGEST_SLEEP_S))
    os._exit(0)
