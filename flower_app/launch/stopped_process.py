"""Detection of standstills: a stopped process of a run (SIGSTOP, SIGTSTP, a debugger), or a machine that slept.

A stopped process keeps its ports and locks, and Flower calls its run running, for a while at least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flower_app.launch.processes import is_stopped

SAY_S, GIVE_UP_S = 5.0, 300.0
"""Times until the user is told, and until the run is given up [s]."""
_STANDSTILL_S = 15.0
"""Shortest standstill that may end a run; between two polls this process itself must have stood still then [s]."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that goes on while the machine sleeps, where the system has one."""


class StoppedProcess:
    """Watch over one process that the run cannot go on without."""

    def __init__(self, name: str, consequence: str, say: Callable[[str], None]) -> None:
        self._name, self._consequence, self._say = name, consequence, say
        self._since: float | None = None
        self._is_reported = False
        self._longest_s = 0.0
        """Longest standstill after which it went on [s]."""

    def reason(self, pid: int | None) -> str:
        """Return why the run is given up; empty while it is not. The user is told before."""
        if pid is None or not is_stopped(pid):
            if self._since is not None:
                self._longest_s = max(self._longest_s, time.monotonic() - self._since)
            self._since, self._is_reported = None, False
            return ""
        self._since = self._since or time.monotonic()
        stopped_s = time.monotonic() - self._since
        if stopped_s > SAY_S and not self._is_reported:
            self._is_reported = True
            self._say(
                f"The {self._name} (process {pid}) is stopped. `kill -CONT {pid}` lets it go on; {self._consequence}, "
                "and --resume continues it."
            )
        if stopped_s <= GIVE_UP_S:
            return ""
        return f"the {self._name} (process {pid}) has been stopped for {stopped_s:.0f} s"

    def cause(self) -> str:
        """Return the end of the message about a run that has failed; empty where it never stood still for long."""
        return _cause(self._longest_s)


class Standstill:
    """Detection of a standstill of this process, and so of the whole run: a laptop that slept, or SIGSTOP for all.

    Flower and Ray give up a peer that was silent for half a minute: a run may end some time after it goes on.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._polled = time.clock_gettime(_CLOCK)
        self._longest_s = 0.0

    def poll(self) -> None:
        """Look at the clock; to be called often."""
        now = time.clock_gettime(_CLOCK)
        stood_s, self._polled = now - self._polled, now
        if stood_s >= _STANDSTILL_S:
            self._longest_s = max(self._longest_s, stood_s)
            self._say(
                f"This machine, or all of the run, stood still for {stood_s:.0f} s; if Flower or Ray has given the run "
                "up meanwhile, --resume continues it."
            )

    def cause(self) -> str:
        """Return the end of the message about a run that has failed; empty where nothing stood still."""
        return _cause(self._longest_s)


def _cause(stood_s: float) -> str:
    if stood_s < _STANDSTILL_S:
        return ""
    return f"; it had stood still for {stood_s:.0f} s before, and Flower and Ray wait about 30 s for a sign"
