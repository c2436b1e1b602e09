"""All that belongs to one start of a run, seen from outside: its processes, their memory, and what it leaves behind."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "COLLAPIPE_SOAK"
_SHM = Path("/dev/shm")
_SETTLED_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The processes at one moment."""

    processes: int
    uss: int
    """Memory that belongs to each process alone, in all [byte]."""
    rss: int
    """Resident, in all; what they share counts once for each [byte]."""


class Family:
    """Processes that have inherited an environment variable, whoever their parents are by now."""

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        # Ray makes sockets deep inside, whose paths may have 107 characters in all.
        self.temp = Path(tempfile.mkdtemp(prefix="soak-", dir=root if len(root) < 16 else "/tmp"))
        self.environment = {MARK: uuid.uuid4().hex, "TMPDIR": str(self.temp)}
        self.pids: set[int] = set()
        self._ours: set[tuple[int, float]] = set()
        self._others: set[tuple[int, float]] = set()
        self._shm = self._shm_names()

    def alive(self) -> list[psutil.Process]:
        """Those that run; zombies do not."""
        found = []
        for process in psutil.process_iter():
            try:
                key = (process.pid, process.create_time())
                if key in self._others:
                    continue
                if key not in self._ours:
                    if process.environ().get(MARK) != self.environment[MARK]:
                        # One that has just been forked shows its parent's environment.
                        if time.time() - key[1] > _SETTLED_S:
                            self._others.add(key)
                        continue
                    self._ours.add(key)
                    self.pids.add(process.pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def find(self, words: str) -> list[psutil.Process]:
        """Processes with these words in their command lines."""
        found = []
        for process in self.alive():
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def sample(self) -> Sample:
        """Count and measure them."""
        count = uss = rss = 0
        for process in self.alive():
            try:
                memory = process.memory_full_info()
            except psutil.Error:
                continue
            count, uss, rss = count + 1, uss + memory.uss, rss + memory.rss
        return Sample(processes=count, uss=uss, rss=rss)

    def left(self, wait_s: float) -> list[str]:
        """Command lines of those that still run after a wait; they are ended."""
        until = time.monotonic() + wait_s
        while (processes := self.alive()) and time.monotonic() < until:
            time.sleep(0.2)
        lines = []
        for process in processes:
            try:
                lines.append(" ".join(process.cmdline())[:120] or process.name())
                process.kill()
            except psutil.Error:
                continue
        return lines

    def files_left(self) -> list[str]:
        """Temporary files, and shared memory that carries the id of one of the processes; the first are removed."""
        temporary = [str(path) for path in self.temp.rglob("*") if not path.is_dir()]
        shutil.rmtree(self.temp, ignore_errors=True)
        new = self._shm_names() - self._shm
        own = [name for name in new if any(int(number) in self.pids for number in re.findall(r"\d+", name))]
        return temporary + [str(_SHM / name) for name in sorted(own)]

    @staticmethod
    def _shm_names() -> set[str]:
        return {path.name for path in _SHM.iterdir()} if _SHM.is_dir() else set()
