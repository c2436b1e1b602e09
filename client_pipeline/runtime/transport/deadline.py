"""Deadline of a wait, which follows the intervals between earlier signs of progress and has an upper bound."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

LEAST_S = 5.0
"""Shortest wait that is suspicious [s]: a busy machine may keep a process waiting for so long."""
_SPREADS = 8.0
_REMEMBERED = 256


class ProgressDeadline:
    """Limit of a wait, derived from the progress so far.

    The allowance is the median of the intervals between two signs of progress, plus eight times their spread. The
    spread is the median of the differences from that median, scaled to a standard deviation.

    A wait is *overdue* after the allowance; each :meth:`extend` doubles it. A wait has *expired* after ``most_s``
    without progress.

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
        self._lock = threading.RLock()
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
        """Double the time until the wait is overdue again."""
        with self._lock:
            self._extensions += 1

    @property
    def allowance_s(self) -> float:
        """Longest wait before it is overdue, without extensions [s]."""
        with self._lock:
            if not self._intervals:
                return max(self._first_s, self.least_s)
            median = statistics.median(self._intervals)
            # 1.4826: the spread of a normal distribution, from the median of the differences.
            spread = 1.4826 * statistics.median(abs(interval - median) for interval in self._intervals)
            return min(max(median + _SPREADS * spread, self.least_s), self.most_s)

    @property
    def waited_s(self) -> float:
        """Time since the last sign of progress, or since the wait began [s]."""
        with self._lock:
            return self._clock() - self._progress_at

    @property
    def overdue(self) -> bool:
        """True if the wait is longer than the progress so far explains."""
        with self._lock:
            return self._clock() - self._progress_at >= min(self.allowance_s * 2**self._extensions, self.most_s)

    @property
    def expired(self) -> bool:
        """True if there was no progress for the longest time that a wait may take."""
        return self.waited_s >= self.most_s
