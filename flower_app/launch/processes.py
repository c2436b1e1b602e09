"""The processes of one run, wherever they went.

SuperLink, SuperExec and Ray start sessions of their own, so no process group holds them all. They have inherited an
environment variable, and by that they are found: each by its id, and none that another run started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    root : id of their common ancestor, for systems that show no environments
    """

    def __init__(self, mark: str, root: int | None = None) -> None:
        self.mark = mark
        self._pids = set() if root is None else {root}

    def add(self, root: int) -> None:
        """Another process whose descendants count."""
        self._pids.add(root)

    def alive(self) -> dict[int, str]:
        """Ids and command lines of those that run; zombies do not."""
        if psutil.LINUX:
            return dict(_marked(self.mark))
        family = _family(self._pids)
        self._pids |= family.keys()
        return family

    def find(self, program: str) -> int | None:
        """Id of a running process whose command line names ``program``."""
        return next((pid for pid, command in self.alive().items() if program in command), None)

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
        # Ray's own processes follow their driver; asked first, they would report its loss as an error.
        flower = {pid: command for pid, command in self.alive().items() if "/ray/" not in command}
        _signal(flower, signal.SIGTERM)
        if _wait(lambda: not self.alive(), polite_s):
            return []

        def kill() -> bool:
            left = self.alive()
            _signal(left, signal.SIGKILL)
            return not left

        _wait(kill, forced_s)
        return sorted(self.alive())


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by SIGSTOP, SIGTSTP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a closing terminal and a polite kill end the run as Ctrl-C does; only the main thread hears signals."""
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


def _marked(mark: str) -> Iterable[tuple[int, str]]:
    """Running processes with the mark in their environment, but for this one."""
    for process in psutil.process_iter():
        # Another user's cannot be read, and any may be gone meanwhile.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and is_alive(process.pid):
                yield process.pid, " ".join(process.cmdline())


def _family(pids: set[int]) -> dict[int, str]:
    """Those of ``pids`` that run, and their descendants."""
    family: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            ancestor = psutil.Process(pid)
            for process in (ancestor, *ancestor.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    if is_alive(process.pid):
                        family[process.pid] = " ".join(process.cmdline())
    return family


def _signal(processes: Iterable[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
