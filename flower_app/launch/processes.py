"""The processes of one run, wherever they went.

SuperLink, SuperExec and Ray start sessions of their own, so no process group holds them all. They inherit an
environment variable, by which each is found by its id, and none that another run started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

MARK = "COLLAPIPE_LAUNCH"
"""Environment variable that all processes of a launch share."""


class RunProcesses:
    """All processes that came out of one launch.

    Parameters
    ----------
    mark : value of :data:`MARK` in their environment
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def alive(self) -> dict[int, str]:
        """Return ids and command lines of those that run; zombies do not."""
        alive = {}
        for process in psutil.process_iter():
            # Another user's cannot be read, and any may be gone meanwhile.
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark and is_alive(process.pid):
                    alive[process.pid] = " ".join(process.cmdline())
        return alive

    def find(self, program: str) -> int | None:
        """Return the id of a process whose command line names ``program``, of a stopped one only without others."""
        return min((pid for pid, command in self.alive().items() if program in command), key=is_stopped, default=None)

    def end(self, polite_s: float = 5.0, forced_s: float = 5.0) -> list[int]:
        """Ask all to end, then end them.

        Parameters
        ----------
        polite_s : time that they get to end themselves [s]
        forced_s : time to wait for the system to clear them away [s]

        Returns
        -------
        Ids that are still there: none, unless the system itself hangs.
        """
        for pid, command in self.alive().items():
            # Ray's own processes follow their driver; asked first, they report its loss as an error.
            if "/ray/" not in command:
                _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + polite_s
        while (alive := self.alive()) and time.monotonic() < deadline + forced_s:
            if time.monotonic() >= deadline:
                for pid in alive:
                    _signal(pid, signal.SIGKILL)
            time.sleep(0.1)
        return sorted(alive)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process stands still by SIGSTOP, SIGTSTP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Have a closing terminal and a polite kill end the run as Ctrl-C does; only the main thread hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # What is ignored stays so: nohup asks to outlive the terminal.
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
