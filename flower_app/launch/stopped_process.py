"""A process that a run cannot go on without, and that stands still: by SIGSTOP, SIGTSTP or a debugger.

Nothing else tells: it is there, it holds its ports and locks, and Flower calls its run running, for a while at least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flower_app.launch.processes import is_stopped

SAY_S, GIVE_UP_S = 5.0, 300.0
"""Times that it is borne without a word, and at all [s]."""


class StoppedProcess:
    """Watches one process of a run.

    Parameters
    ----------
    name : what it is, in words
    consequence : what becomes of the run if it stays so, in words
    say : told once, each time that it is stopped
    """

    def __init__(self, name: str, consequence: str, say: Callable[[str], None]) -> None:
        self._name, self._consequence, self._say = name, consequence, say
        self._since: float | None = None
        self._told = False

    def look(self, pid: int | None) -> float:
        """Tell the user what is the matter.

        Parameters
        ----------
        pid : of the process; None while there is none

        Returns
        -------
        For how long it has been stopped [s]; 0 while it runs.
        """
        if pid is None or not is_stopped(pid):
            self._since, self._told = None, False
            return 0.0
        self._since = self._since or time.monotonic()
        stopped_s = time.monotonic() - self._since
        if stopped_s > SAY_S and not self._told:
            self._told = True
            self._say(
                f"The {self._name} (process {pid}) is stopped. `kill -CONT {pid}` lets it go on; {self._consequence}, "
                "and --resume continues it."
            )
        return stopped_s

    def reason(self, pid: int | None) -> str:
        """Why the run is given up; empty while it is not. Says what is the matter before."""
        stopped_s = self.look(pid)
        return (
            f"the {self._name} (process {pid}) has been stopped for {stopped_s:.0f} s" if stopped_s > GIVE_UP_S else ""
        )
