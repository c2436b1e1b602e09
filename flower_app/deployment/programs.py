"""The programs of one machine: started in order, watched together, ended together. A service manager does the rest."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flower_app.deployment.box_guard import start_guard
from flower_app.launch.processes import MARK, RunProcesses, interruptible

_POLL_S = 0.5
_AGAIN_S = 3.0
_LAST_S = 5.0
"""For the system to clear away a process that was killed."""
READY_S = 300.0
"""How long a program may take to answer: slow machines take long to import."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a machine."""

    name: str
    command: Sequence[str]
    answers: Callable[[], bool] = lambda: True
    """Whether it does its work by now; the next program starts then."""
    then: Callable[[], None] = lambda: None
    """Called once, when it answers."""
    again_s: float = 0.0
    """If it ends within this time it is started again: what it needs may come later [s]."""
    before_again: Callable[[], None] = lambda: None
    """Called each time before it is started again."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of it alone, beside that of all."""


class _Running:
    """A program that was started, and when."""

    def __init__(
        self, program: Program, environment: Mapping[str, str], work: Path, say: Callable[[str], None]
    ) -> None:
        self.program, self._environment, self._work, self._say = program, dict(environment), work, say
        self._first = time.monotonic()
        self.child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(self.program.command),
            cwd=self._work,
            env={**self._environment, **self.program.environment},
            stdin=subprocess.DEVNULL,
            # Ctrl-C at the terminal is ours to handle.
            start_new_session=True,
        )

    def ended(self) -> str:
        """How it has ended for good; empty while it runs."""
        code = self.child.poll()
        if code is None:
            return ""
        if time.monotonic() - self._first > self.program.again_s:
            return f"{self.program.name} ended with exit code {code}"
        self._say(f"{self.program.name} ended with exit code {code}; it is started again")
        time.sleep(_AGAIN_S)
        self.program.before_again()
        self.child = self._start()
        return ""


def run_programs(
    programs: Sequence[Program],
    environment: Mapping[str, str],
    work: Path,
    say: Callable[[str], None],
    temporary: Sequence[Path] = (),
    until: Callable[[], str] = lambda: "",
) -> int:
    """Start programs one after the other, and stay until one of them ends or somebody asks for the end of all.

    Parameters
    ----------
    programs : in the order of their start
    environment : of all; has the mark that their processes are found by
    work : made; their working directory
    say : told what has started, and what ended
    temporary : folders that go with the programs if this process is killed
    until : why they have to end; empty as long as they go on

    Returns
    -------
    Exit code: 0 after SIGTERM, SIGHUP or Ctrl-C, 1 if a program ended or did not answer. None is left behind, not
    even after SIGKILL.
    """
    work.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    guard = start_guard(environment, temporary)
    try:
        with interruptible():
            for program in programs:
                running.append(_Running(program, environment, work, say))
                if not _until_answers(program, running, say):
                    return 1
                program.then()
                say(f"{program.name} is up")
            while not (ended := _ended(running) or until()):
                time.sleep(_POLL_S)
            say(f"error: {ended}; ending the other programs of this machine")
            return 1
    except KeyboardInterrupt:
        say("ending")
        return 0
    finally:
        processes = RunProcesses(environment[MARK])
        for running_program in running:
            processes.add(running_program.child.pid)
        processes.end()
        for running_program in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running_program.child.wait(_LAST_S)
        # It has the programs' mark, and so has ended with them.
        guard.kill()
        guard.wait()


def _until_answers(program: Program, running: Sequence[_Running], say: Callable[[str], None]) -> bool:
    deadline = time.monotonic() + READY_S
    while not program.answers():
        if ended := _ended(running):
            say(f"error: {ended}, before {program.name} answered; its own words are above")
            return False
        if time.monotonic() > deadline:
            say(f"error: {program.name} does not answer within {READY_S:g} s; its own words are above")
            return False
        time.sleep(_POLL_S)
    return True


def _ended(running: Sequence[_Running]) -> str:
    return next(filter(None, (running_program.ended() for running_program in running)), "")


def listens(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def wait_until_listens(host: str, port: int, timeout_s: float, remedy: str) -> None:
    """Wait, with a bound, for another machine's program.

    Raises
    ------
    ValueError
        With the remedy, if nobody accepted a connection in time.
    """
    deadline = time.monotonic() + timeout_s
    while not listens(host, port):
        if time.monotonic() > deadline:
            raise ValueError(f"nobody answers at {host}:{port} within {timeout_s:g} s; {remedy}")
        time.sleep(_POLL_S)
