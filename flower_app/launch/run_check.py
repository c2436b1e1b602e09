"""A new run's checks, beside the start of its programs: in another process, which takes along what it imports.

The checks need torch and the planner, the command that launches a run needs neither: it would hold 300 MB for as long
as the run lasts, and its programs would wait for the imports. A simulation has a process that imports both anyway, and
forks one that checks.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from client_pipeline.quick_imports import quick_imports
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import read_config
from flower_app.error_text import mistake_text

_MISTAKES = (FileNotFoundError, ValueError)
"""A user's; who launches the run tells of them in a line."""
_INFEASIBLE = "InfeasibleRound"
"""By its name: its module imports the planner's."""


class RunCheck:
    """The check of one configuration: by a fork of this process, or by whoever else is given the end of a pipe.

    Where this process has torch already it is made here, and is over when this is made; where it has threads, or cannot
    fork, it is made here if nobody else makes it.

    Parameters
    ----------
    config : the run's

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        As :func:`flower_app.launch.preflight.check_run`, if it is over at once.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._answer: Connection | None = None
        self._fork: BaseProcess | None = None
        self.is_over = "torch" in sys.modules
        """Whether nobody waits for it any more."""
        if self.is_over:
            _check(config)

    def hand_over(self) -> Connection:
        """Leave it to another process, which says by :func:`check_and_tell` what comes of it.

        Returns
        -------
        The end of a pipe that the other inherits, and that has to be closed here then.
        """
        self._answer, sending_end = multiprocessing.Pipe(duplex=False)
        return sending_end

    def begin(self) -> None:
        """Have a fork of this process make it, beside what this process does next; nothing where it cannot fork."""
        if not self.is_over and self._answer is None and _can_fork():
            self._fork_check()

    def wait(self) -> None:
        """Wait until it is over; it is made now if nobody makes it, or whoever was to has gone without a word.

        Raises
        ------
        ValueError, FileNotFoundError, InfeasibleRound
            As :func:`flower_app.launch.preflight.check_run`.
        ChildProcessError
            If a fork of this process ended without an answer: the system may have ended it for want of memory.
        """
        if self.is_over:
            return
        try:
            answer = self._hear() or self._make()
        finally:
            self.give_up()
        if (error := json.loads(answer)) is not None:
            raise _raised_there(**error)

    def give_up(self) -> None:
        """End it; nobody wants to know any more."""
        self.is_over = True
        if self._answer is not None:
            self._answer.close()
        if self._fork is not None:
            self._fork.terminate()
            self._fork.join()
        self._answer = None

    def _hear(self) -> bytes:
        """The answer; empty if there is nobody to give one."""
        if self._answer is None:
            return b""
        try:
            return self._answer.recv_bytes()
        except (EOFError, OSError):
            # Its process has ended, before its answer or in the midst of it.
            return b""

    def _make(self) -> bytes:
        """The answer of a fork, or of this process."""
        if self._fork is None:
            self.give_up()
            if not _can_fork():
                _check(self._config)
                return b"null"
            self._fork_check()
            if answer := self._hear():
                return answer
        assert self._fork is not None
        self._fork.join()  # its exit code is in the message
        raise ChildProcessError(
            f"the checks of the run ended without an answer, with exit code {self._fork.exitcode}; is there "
            "memory enough for the model?"
        )

    def _fork_check(self) -> None:
        context = multiprocessing.get_context("fork")
        # Else nobody would notice that the process has ended without a word.
        with self.hand_over() as sending_end:
            self._fork = context.Process(target=check_and_tell, args=(self._config, sending_end), daemon=True)
            self._fork.start()


def _can_fork() -> bool:
    # A lock that another thread holds would stay locked in the child for good.
    return threading.active_count() == 1 and sys.platform.startswith("linux")


def _check(config: RunConfig) -> None:
    with quick_imports():
        from flower_app.launch.preflight import check_run

    check_run(config)


def check_and_tell(config: RunConfig | Path, sending_end: Connection) -> None:
    """Check in this process, and tell the one that waits of the error, or of none.

    Parameters
    ----------
    config : the run's, or its file
    sending_end : as :meth:`RunCheck.hand_over` gives it
    """
    # Ctrl-C at the terminal is for the one who launches the run, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = None
    try:
        _check(RunConfig.from_flat(read_config(config)) if isinstance(config, Path) else config)
    except Exception as raised:
        error = _description(raised)
    # Who asked may be gone.
    with contextlib.suppress(OSError):
        sending_end.send_bytes(json.dumps(error).encode())


def _description(error: Exception) -> dict[str, Any]:
    """Say of an error what another process makes it of again; its traceback in words, as it stays behind."""
    text = mistake_text(error)
    mistake = (FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError).__name__ if text else ""
    reasons = getattr(error, "left_out", None) if type(error).__name__ == _INFEASIBLE else None
    return {
        "mistake": mistake,
        "text": text or f"{type(error).__name__}: {error}",
        "round_and_reasons": None if reasons is None else [getattr(error, "number", 0), list(reasons.items())],
        "note": traceback.format_exc(),
    }


def _raised_there(
    mistake: str, text: str, round_and_reasons: tuple[int, list[tuple[int, str]]] | None, note: str
) -> Exception:
    error: Exception = next((kind for kind in _MISTAKES if kind.__name__ == mistake), RuntimeError)(text)
    if round_and_reasons is not None:
        from strategies.planning.planner import InfeasibleRound

        error = InfeasibleRound(round_and_reasons[0], dict(round_and_reasons[1]))
    error.add_note(note)
    return error
