"""The processes of one run, wherever they went.

SuperLink, SuperExec and Ray start sessions of their own, so no process group holds them all. They have inherited an
environment variable, and by that they are found: each by its id, and none that another run started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
        self._known = set() if root is None else {root}

    def add(self, root: int) -> None:
        """Another process whose descendants count."""
        self._known.add(root)

    def alive(self) -> dict[int, str]:
        """Ids and command lines of those that run; zombies do not."""
        if Path("/proc/self/environ").exists():
            return dict(_marked(f"{MARK}={self.mark}"))
        family = _family(self._known)
        self._known |= family.keys()
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
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The second field, the name, is in brackets and may hold anything.
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (OSError, IndexError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a closing terminal and a polite kill end the run as Ctrl-C does."""

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


def _marked(entry: str) -> Iterable[tuple[int, str]]:
    wanted = entry.encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            # Another user's, or gone meanwhile.
            continue


def _family(known: set[int]) -> dict[int, str]:
    """Those of ``known`` that run, and their descendants."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
    processes = {int(row[0]): row for row in rows if len(row) == 4 and not row[2].startswith("Z")}
    family: set[int] = set()
    grown = known & processes.keys()
    while grown != family:
        family = grown
        grown = family | {pid for pid, row in processes.items() if int(row[1]) in family}
    return {pid: processes[pid][3] for pid in family}


def _signal(processes: Iterable[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
