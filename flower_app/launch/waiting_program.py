"""A program as a fork of another that has imported what both need: it waits until somebody starts it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SUPEREXEC = "flower-superexec"
"""The program that a SuperLink starts, and a SuperNode."""
_SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
_POLL_S = 0.02
_ARGUMENTS = 45
"""Of the fields after the name in ``/proc/self/stat``, where the command line begins; the next one is its end."""


class WaitingProgram:
    """A fork that becomes a program when it is sent its arguments; once started, as much of a ``Popen`` as Flower uses.

    It ends without them when nobody is left who could send some. On other systems than Linux there is no fork: what is
    started has a process of its own, as in Flower.

    Parameters
    ----------
    name : of the program
    load : makes ready what it needs, and gives what runs it
    """

    def __init__(self, name: str, load: Callable[[], Callable[[], Any]]) -> None:
        self.name, self._arguments, self.pid = name, -1, 0
        # Other systems' libraries need not survive a fork.
        if sys.platform != "linux":
            return
        read, self._arguments = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._arguments)
            _become(name, read, load)
        os.close(read)

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Start a command as ``subprocess.Popen`` would: this program, once, or another that has a process of its own.

        It has this process's output or none, may lead a session, and knows no other options.
        """
        if command[0] == self.name and not options.items() - {"start_new_session": True, **_SILENT}.items():
            # It may be gone, or have started already; it saves time, and no more.
            with contextlib.suppress(OSError), open(self._give_up(), "w", encoding="utf-8") as pipe:
                order = {
                    "arguments": command[1:],
                    "silent": "stdout" in options,
                    "leads": "start_new_session" in options,
                }
                json.dump(order, pipe)
                return self
        return subprocess.Popen(command, **options)

    @property
    def waits(self) -> bool:
        """Whether this process can still start it."""
        return self._arguments >= 0

    def forget(self) -> None:
        """Leave it to others to start."""
        with contextlib.suppress(OSError):
            os.close(self._give_up())

    def _give_up(self) -> int:
        if self._arguments < 0:
            raise BrokenPipeError("it was sent its arguments before, or given up")
        pipe, self._arguments = self._arguments, -1
        return pipe

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        """Wait for its end, in the process that it is a fork of.

        Raises
        ------
        subprocess.TimeoutExpired
            If it is there after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self.name, timeout)
                time.sleep(_POLL_S)


def _become(name: str, arguments: int, load: Callable[[], Callable[[], Any]]) -> None:
    """Wait for arguments, and be the program; does not return."""
    run = load()
    with open(arguments, encoding="utf-8") as pipe:
        text = pipe.read()
    if not text:
        sys.exit()
    order = json.loads(text)
    if order["leads"]:
        os.setsid()
    if order["silent"]:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nothing, output)
    sys.argv = [name, *order["arguments"]]
    show_as(name)
    sys.exit(run())


def _command_line() -> tuple[int, int]:
    """Where this process's command line lies in its memory, from and to; the same twice if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = (int(field) for field in fields[_ARGUMENTS : _ARGUMENTS + 2])
    except (OSError, ValueError):
        return 0, 0
    return begin, end


def can_show_as() -> bool:
    """Whether :func:`show_as` has an effect."""
    begin, end = _command_line()
    return begin < end


def show_as(title: str) -> None:
    """Have the system's tools show another command line of this process; its environment stays to be seen."""
    begin, end = _command_line()
    if begin >= end:
        return
    text = title.encode()[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))
