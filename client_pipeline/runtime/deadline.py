"""One deadline for every wait: it follows what was seen to be usual, and has an end whatever was seen."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

LEAST_S = 5.0
"""Nothing is suspicious before that: a busy machine may keep a process waiting for so long [s]."""
_SPREADS = 8.0
_REMEMBERED = 256


class ProgressDeadline:
    """Says when a wait has become longer than the progress so far explains.

    The allowance is the median of the intervals between two signs of progress, and eight times their spread (the median
    of what they differ from it, scaled to a standard deviation): a rhythm that is even is held to, one that is not is
    given more. As long as nothing has been seen it is ``most_s``.

    A wait that is *overdue* gives a reason to ask; after :meth:`extend` it is so again after twice the time. One that
    has *expired* has had no progress for ``most_s``, and nobody waits any longer.

    Parameters
    ----------
    most_s : longest time without progress [s]
    least_s : shortest allowance [s]; at most ``most_s``
    first_s : allowance before anything was seen [s]; ``most_s`` if None
    clock : [s]; a monotonic one

    Safe to call from several threads.
    """

    def __init__(
        self,
        most_s: float,
        least_s: float = LEAST_S,
        first_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_s = most_s
        self.least_s = min(least_s, most_s)
        self._first_s = most_s if first_s is None else min(first_s, most_s)
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()
        self._progress_at = clock()
        self._extensions = 0

    def allow(self, most_s: float) -> None:
        """Set the longest time without progress from here on [s]."""
        self.most_s = most_s

    def begin(self) -> None:
        """Begin a wait: the time since the last sign of progress was no wait."""
        with self._lock:
            self._progress_at, self._extensions = self._clock(), 0

    def progress(self) -> None:
        """Note a sign of progress."""
        with self._lock:
            now = self._clock()
            self._intervals.append(now - self._progress_at)
            self._progress_at, self._extensions = now, 0

    def extend(self) -> None:
        """Bear with a wait that is overdue for a good reason: twice as long as before."""
        with self._lock:
            self._extensions += 1

    @property
    def allowance_s(self) -> float:
        """What a wait may take before it is overdue, extensions left out [s]."""
        with self._lock:
            return self._allowance_s()

    @property
    def waited_s(self) -> float:
        """Time since the last sign of progress, or since the wait began [s]."""
        with self._lock:
            return self._clock() - self._progress_at

    @property
    def overdue(self) -> bool:
        """Whether the wait is longer than the progress so far explains."""
        with self._lock:
            return self._clock() - self._progress_at >= min(self._allowance_s() * 2**self._extensions, self.most_s)

    @property
    def expired(self) -> bool:
        """Whether there has been no progress for as long as anyone may wait."""
        return self.waited_s >= self.most_s

    @property
    def left_s(self) -> float:
        """Time until the wait is overdue [s]; 0 if it is."""
        with self._lock:
            allowed = min(self._allowance_s() * 2**self._extensions, self.most_s)
            return max(self._progress_at + allowed - self._clock(), 0.0)

    def _allowance_s(self) -> float:
        if not self._intervals:
            return max(self._first_s, self.least_s)
        median = statistics.median(self._intervals)
        # 1.4826: the spread of a normal distribution, from the median of the differences.
        spread = 1.4826 * statistics.median(abs(interval - median) for interval in self._intervals)
        return min(max(median + _SPREADS * spread, self.least_s), self.most_s)
