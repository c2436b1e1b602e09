"""One run of the Flower app in simulation, watched from start to end.

``flwr run`` exits 0 when the server app raised and when all clients failed, and a killed simulation shows as running
for a minute. So what counts is what the run wrote, and whether its processes live.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_app.launch.processes import interruptible, is_alive
from flower_app.launch.superlink import SIMULATION, PrivateSuperLink
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

EXIT_CODES = {FINISHED: 0, FAILED: 1, BAD_INPUT: 2, INFEASIBLE: 3, INTERRUPTED: 130}

_LAST_WORDS_S = 2.0
"""Time for a summary to appear after the processes ended [s]."""
_SUBMISSION_S = 300.0
_LOG_S = 60.0
"""Time for a finished simulation to end by itself, so that its log is whole [s]."""
_PORTS = 5
"""Ports that are tried for the SuperLink."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FLOWERS = "An error was encountered. Ending simulation."
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Stop|Failure)\b(: .*)?$")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """A value of :data:`flower_app.runs.run_directory.STATUSES`."""
    error: str = ""
    """For the user; empty if finished."""
    summary: dict[str, Any] = field(default_factory=dict)
    """What the run wrote."""

    @property
    def exit_code(self) -> int:
        """0 finished, 1 failed, 2 bad input, 3 infeasible, 130 interrupted."""
        return EXIT_CODES.get(self.status, 1)


def launch(
    run_dir: Path,
    app: Path,
    run_config: Path,
    num_supernodes: int,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
    kept: Sequence[int] = (),
) -> Outcome:
    """Run a Flower app to its end.

    Parameters
    ----------
    run_dir : where the server app writes ``summary.json`` when it is done; programs' output goes to its ``logs``
    app : folder of the Flower app
    run_config : TOML file that overrides the app's configuration
    num_supernodes : number of simulated nodes, all of which run at once
    watch : called after each poll, to show progress
    poll_s : time between polls [s]
    kept : descriptors that stay open as long as any process of the run

    Raises
    ------
    KeyboardInterrupt
        On Ctrl-C, SIGTERM and SIGHUP, after all processes were ended.
    """
    (run_dir / "logs").mkdir(exist_ok=True)
    flower = run_dir / "flower"
    try:
        with interruptible():
            for attempt in range(_PORTS):
                superlink = PrivateSuperLink(flower, run_dir / "logs")
                with closing(superlink):
                    superlink.start(app, run_config, num_supernodes, kept)
                    outcome = _follow(superlink, run_dir, watch, poll_s)
                    if outcome.status == FINISHED:
                        superlink.pass_log_on(_LOG_S)
                # The port was free when it was chosen.
                if not superlink.lost_its_port or attempt == _PORTS - 1:
                    break
    except KeyboardInterrupt:
        # The server app may have written that it was killed; that was us.
        write_summary(run_dir, INTERRUPTED, error="interrupted")
        raise
    if outcome.status == FINISHED:
        # After a failure it may tell why.
        shutil.rmtree(flower, ignore_errors=True)
    elif read_summary(run_dir) is None and not is_served(run_dir):
        write_summary(run_dir, outcome.status, error=outcome.error)
    return outcome


def _follow(superlink: PrivateSuperLink, run_dir: Path, watch: Callable[[], None], poll_s: float) -> Outcome:
    """Poll until there is a summary, or nobody left to write one."""
    simulation: int | None = None
    started = time.monotonic()
    while True:
        watch()
        summary = read_summary(run_dir)
        if summary is not None:
            return Outcome(str(summary.get("status")), str(summary.get("error", "")), summary)
        assert superlink.processes is not None
        simulation = simulation or superlink.processes.find(SIMULATION)
        reason = _death(superlink, simulation, time.monotonic() - started)
        if reason:
            return _last_words(superlink, run_dir, reason)
        time.sleep(poll_s)


def _death(superlink: PrivateSuperLink, simulation: int | None, waited_s: float) -> str:
    """Why no summary can come any more; empty if one can."""
    assert superlink.server is not None and superlink.submission is not None
    if superlink.server.poll() is not None:
        return f"the SuperLink ended with exit code {superlink.server.returncode}; see {superlink.superlink_log}"
    if simulation is not None:
        # flwr run only passes the log on by now: a run goes on without it.
        return "" if is_alive(simulation) else "the simulation ended without a result"
    if superlink.submission.poll() is not None:
        if superlink.submission.returncode:
            return "flwr run did not accept the app"
        return "the simulation ended without a result"
    if waited_s > _SUBMISSION_S:
        return f"no simulation started within {_SUBMISSION_S:.0f} s; see {superlink.superlink_log}"
    return ""


def _last_words(superlink: PrivateSuperLink, run_dir: Path, reason: str) -> Outcome:
    """Wait for a summary written at the last moment, and for the log to arrive."""
    deadline = time.monotonic() + _LAST_WORDS_S
    error = ""
    while time.monotonic() < deadline:
        summary = read_summary(run_dir)
        if summary is not None:
            return Outcome(str(summary.get("status")), str(summary.get("error", "")), summary)
        error = last_error(superlink.simulation_log)
        assert superlink.submission is not None
        if superlink.submission.poll() is not None and error:
            break
        time.sleep(0.1)
    told = f"{reason}: {error}" if error else reason
    return Outcome(FAILED, f"{told}; see {superlink.simulation_log}")


def last_error(log: Path) -> str:
    """The last exception in a program's output, or the last line that reports an error; empty if there is none."""
    try:
        lines = _COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    except FileNotFoundError:
        return ""
    raised = [line.strip() for line in reversed(lines) if _EXCEPTION.match(line.strip())]
    if raised:
        # Flower raises one of its own from that which ended a simulation.
        return next((line for line in raised if _FLOWERS not in line), raised[0])
    return next((line.strip() for line in reversed(lines) if line.lstrip(" │").startswith("Error")), "")
