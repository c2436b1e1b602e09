"""Launchers, which hand a Flower app to a SuperLink and follow the run to its end.

There are two: :class:`~flower_app.launch.simulation.SimulationLauncher` starts a SuperLink of its own on this machine,
:class:`~flower_app.deployment.deployed_run.Deployment` takes one that serves real machines. ``flwr run`` exits 0 when
the server app raised and when all clients failed. So what counts is what the run wrote, and whether it still lives.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flower_app.launch.stopped_process import Standstill, StoppedProcess
from flower_app.runs.run_directory import (
    BAD_INPUT,
    FAILED,
    FINISHED,
    INFEASIBLE,
    INTERRUPTED,
    read_summary,
    write_summary,
)
from flower_app.runs.run_lock import is_served
from flower_app.runs.run_logs import LOGS

EXIT_CODES = {FINISHED: 0, FAILED: 1, BAD_INPUT: 2, INFEASIBLE: 3, INTERRUPTED: 130}

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WRAPPERS = ("An error was encountered. Ending simulation.", "Simulation Runtime crashed.")
"""Texts of errors that Flower raises from those that ended a simulation."""
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*)?(Error|Exception|Interrupt|Exit|Stop|Failure)\b(: .*)?$")


@dataclass(frozen=True)
class Outcome:
    """End of a run."""

    status: str
    """A value of :data:`flower_app.runs.run_directory.STATUSES`."""
    error: str = ""
    """For the user; empty if finished."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The run's own summary."""

    @property
    def exit_code(self) -> int:
        """0 finished, 1 failed, 2 bad input, 3 infeasible, 130 interrupted."""
        return EXIT_CODES.get(self.status, 1)


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """A Flower app that is ready to run."""

    run_dir: Path
    """Run directory, with the server app's ``summary.json`` and the programs' output in ``logs``."""
    app: Path
    """Folder of the Flower app."""
    run_config: Path
    """TOML file that overrides the app's configuration."""
    num_clusters: int
    """Number of nodes."""
    clients_at_once: int = 0
    """Client apps that a simulation runs at the same time, each in a process of its own; 0: all."""
    watch: Callable[[], None] = lambda: None
    """Called after each poll, to show progress."""
    finished: Callable[[], None] = lambda: None
    """Called once a run has finished, by a launcher whose programs take a while to end: work for the meantime."""
    say: Callable[[str], None] = lambda text: None
    """Receives lines that ask for the user's attention while the run goes on."""
    poll_s: float = 0.5
    """Time between polls [s]."""

    @property
    def flower(self) -> Path:
        """Folder of what the run's Flower programs need; removed when it has finished."""
        return self.run_dir / "flower"

    @property
    def logs(self) -> Path:
        """Folder of what the run's programs print."""
        return self.run_dir / LOGS

    def outcome(self) -> Outcome | None:
        """Return how the run ended; None while it has not."""
        summary = read_summary(self.run_dir)
        if summary is None:
            return None
        return Outcome(str(summary.get("status")), str(summary.get("error", "")), summary)

    def follow(self, end: Callable[[], Outcome | None], pause: StoppedProcess) -> Outcome:
        """Poll until there is a summary, or ``end`` knows that none can come; ``end`` waits for the next poll.

        A failure is told with the standstill, of ``pause`` or of all, that came before it.
        """
        standstill = Standstill(self.say)
        while True:
            standstill.poll()
            self.watch()
            if outcome := self.outcome() or end():
                if outcome.status in (FINISHED, BAD_INPUT):
                    return outcome
                return replace(outcome, error=outcome.error + (standstill.cause() or pause.cause()))

    def last_outcome(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> Outcome | None:
        """Wait for a summary written at the last moment, for ``seconds`` or until ``is_over``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if outcome := self.outcome():
                return outcome
            if is_over():
                break
            time.sleep(0.1)
        return None

    def conclude(self, outcome: Outcome) -> Outcome:
        """Leave the run directory with a summary, and without the run's programs if it has finished."""
        if outcome.status == FINISHED:
            # After a failure the folder may hold the reason.
            shutil.rmtree(self.flower, ignore_errors=True)
        elif read_summary(self.run_dir) is None and not is_served(self.run_dir):
            try:
                write_summary(self.run_dir, outcome.status, error=outcome.error)
            except OSError as error:
                # The command reports the end of the run anyway.
                return replace(outcome, error=f"{outcome.error}; its summary was not written: {error}")
        return outcome


class Launcher(Protocol):
    """Runs a Flower app to its end."""

    def launch(self, order: LaunchOrder) -> Outcome:
        """Run a Flower app to its end, and leave its summary.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C, SIGTERM and SIGHUP, after the run was stopped.
        """


def last_error(log: Path) -> str:
    """Return the last exception in a program's output, or its last line that reports an error; empty without one."""
    try:
        lines = _COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    except FileNotFoundError:
        return ""
    raised = [line.strip() for line in reversed(lines) if _EXCEPTION.match(line.strip())]
    if raised:
        return next((line for line in raised if not line.endswith(_WRAPPERS)), raised[0])
    return next((line.strip() for line in reversed(lines) if line.lstrip(" │").startswith("Error")), "")
