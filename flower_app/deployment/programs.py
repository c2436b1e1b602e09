"""Programs of one machine: started in order, watched together, ended together. A service manager does the rest."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flower_app.launch.processes import MARK, RunProcesses, interruptible

_POLL_S = 0.5
_AGAIN_S = 3.0
_LAST_LINES = 20
_LAST_S = 5.0
"""For the system to clear away a process that was killed."""
READY_S = 300.0
"""Time for a program to answer: slow machines take long to import [s]."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a machine."""

    name: str
    command: Sequence[str]
    answers: Callable[[], bool] = lambda: True
    """Returns True once the program does its work; the next program starts then."""
    then: Callable[[], None] = lambda: None
    """Called once, when it answers."""
    again_s: float = 0.0
    """Time within which a program that ends is started again: its peer may come later [s]."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of this program alone, beside that of all."""
    log: Path | None = None
    """File for what it prints; None: the terminal."""

    def last_words(self) -> str:
        """Name the file of the program's output, and repeat its last lines."""
        if self.log is None:
            return "its own words are above"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join([f"its own words are in {self.log}:", *lines[-_LAST_LINES:]])


class _Running:
    """A program that was started, and when."""

    def __init__(
        self, program: Program, environment: Mapping[str, str], work: Path, say: Callable[[str], None]
    ) -> None:
        self.program, self._environment, self._work, self._say = program, dict(environment), work, say
        self._first = time.monotonic()
        self._is_up = False
        self.child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.program.log.open("ab") if self.program.log else contextlib.nullcontext() as log:
            return subprocess.Popen(
                list(self.program.command),
                cwd=self._work,
                env={**self._environment, **self.program.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal is ours to handle.
                start_new_session=True,
            )

    def ended(self) -> str:
        """Return how the program has ended for good; empty while it runs."""
        code = self.child.poll()
        if code is None:
            return ""
        if time.monotonic() - self._first > self.program.again_s:
            return f"{self.program.name} ended with exit code {code}"
        self._say(f"{self.program.name} ended with exit code {code}; it is started again")
        time.sleep(_AGAIN_S)
        self._is_up = False
        self.child = self._start()
        return ""

    def say_if_up(self) -> None:
        """Say so once after each start."""
        if not self._is_up and self.program.answers():
            self._is_up = True
            self._say(f"{self.program.name} is up")


def run_programs(
    programs: Sequence[Program],
    environment: Mapping[str, str],
    work: Path,
    say: Callable[[str], None],
    until: Callable[[], str] = lambda: "",
) -> int:
    """Start programs one after the other, and stay until one of them ends or somebody asks for the end of all.

    Parameters
    ----------
    programs : in the order of their start
    environment : environment of all, with the mark by which their processes are found
    work : their working directory; made if it is not there
    say : receives a line for each start and end
    until : returns the reason to end them; empty as long as there is none

    Returns
    -------
    Exit code: 0 after SIGTERM, SIGHUP or Ctrl-C, 1 if a program ended or did not answer. No program is left behind;
    after SIGKILL :func:`flower_app.deployment.sole_start.sole_start` ends them.
    """
    work.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    try:
        with interruptible():
            for program in programs:
                running.append(_Running(program, environment, work, say))
                if not _until_answers(program, running, say):
                    return 1
                program.then()
                running[-1].say_if_up()
            while not (ended := _ended(running) or until()):
                time.sleep(_POLL_S)
                for one in running:
                    one.say_if_up()
            say(f"error: {ended}; ending the other programs of this machine; {_last_words(running)}")
            return 1
    except KeyboardInterrupt:
        say("ending")
        return 0
    finally:
        RunProcesses(environment[MARK]).end()
        for running_program in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running_program.child.wait(_LAST_S)


def _until_answers(program: Program, running: Sequence[_Running], say: Callable[[str], None]) -> bool:
    deadline = time.monotonic() + READY_S
    while not program.answers():
        if ended := _ended(running):
            say(f"error: {ended}, before {program.name} answered; {_last_words(running)}")
            return False
        if time.monotonic() > deadline:
            say(f"error: {program.name} does not answer within {READY_S:g} s; {program.last_words()}")
            return False
        time.sleep(_POLL_S)
    return True


def _ended(running: Sequence[_Running]) -> str:
    return next(filter(None, (running_program.ended() for running_program in running)), "")


def _last_words(running: Sequence[_Running]) -> str:
    ended = [one.program for one in running if one.child.poll() is not None]
    return "; ".join(program.last_words() for program in ended) or "what they printed is above"


def listens(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Return whether a program accepts connections at an address."""
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
