"""A new run's checks, beside the start of its programs: in a process of their own, which takes along what it imports.

The checks need torch and the planner, the command that launches a run needs neither: it would hold 300 MB for as long
as the run lasts, and its programs would wait for the imports.
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
from typing import Any

from client_pipeline.quick_imports import quick_imports
from flower_app.config.run_config import RunConfig

_MISTAKES = (FileNotFoundError, ValueError)
"""A user's; who launches the run tells of them in a line."""
_INFEASIBLE = "InfeasibleRound"
"""By its name: its module imports the planner's."""


class RunCheck:
    """The check of one configuration, which begins at once.

    Where this process has threads, or torch already, or cannot fork, it is made here and is over when this is made.

    Parameters
    ----------
    config : the run's

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        As :func:`flower_app.launch.preflight.check_run`, if it is made here.
    """

    def __init__(self, config: RunConfig) -> None:
        self._answer: Connection | None = None
        if not _can_fork():
            _check(config)
            return
        context = multiprocessing.get_context("fork")
        self._answer, sending_end = context.Pipe(duplex=False)
        self._process = context.Process(target=_check_and_tell, args=(config, sending_end), daemon=True)
        self._process.start()
        # Else nobody would notice that the process has ended without a word.
        sending_end.close()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._answer is None

    def wait(self) -> None:
        """Wait until it is over.

        Raises
        ------
        ValueError, FileNotFoundError, InfeasibleRound
            As :func:`flower_app.launch.preflight.check_run`.
        ChildProcessError
            If the process ended without an answer: the system may have ended it for want of memory.
        """
        if self._answer is None:
            return
        answer, self._answer = self._answer, None
        try:
            error = json.loads(answer.recv_bytes())
        except EOFError:
            self._process.join()  # its exit code is in the message
            raise ChildProcessError(
                f"the checks of the run ended without an answer, with exit code {self._process.exitcode}; is there "
                "memory enough for the model?"
            ) from None
        except BaseException:
            self._process.terminate()
            raise
        finally:
            answer.close()
            self._process.join()
        if error is not None:
            raise _raised_there(**error)

    def give_up(self) -> None:
        """End it; nobody wants to know any more."""
        if self._answer is not None:
            self._process.terminate()
            self._process.join()
            self._answer.close()
            self._answer = None


def _can_fork() -> bool:
    # A lock that another thread holds would stay locked in the child for good.
    alone = threading.active_count() == 1 and sys.platform.startswith("linux")
    return alone and "torch" not in sys.modules


def _check(config: RunConfig) -> None:
    with quick_imports():
        from flower_app.launch.preflight import check_run

    check_run(config)


def _check_and_tell(config: RunConfig, sending_end: Connection) -> None:
    """Check in this process, and tell the one that has started it of the error, or of none."""
    # Ctrl-C at the terminal is for the one who launches the run, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = None
    try:
        _check(config)
    except Exception as raised:
        error = _description(raised)
    # Who asked may be gone.
    with contextlib.suppress(OSError):
        sending_end.send_bytes(json.dumps(error).encode())


def _description(error: Exception) -> dict[str, Any]:
    """Say of an error what another process makes it of again; its traceback in words, as it stays behind."""
    kinds = (kind for kind in _MISTAKES if isinstance(error, kind))
    mistake = next((kind.__name__ for kind in kinds), "")
    reasons = getattr(error, "left_out", None) if type(error).__name__ == _INFEASIBLE else None
    return {
        "mistake": mistake,
        "text": str(error) if mistake else f"{type(error).__name__}: {error}",
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
