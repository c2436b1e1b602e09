"""What a launcher is: it hands a Flower app to a SuperLink, and follows the run to its end.

There are two: :class:`~flower_app.launch.simulation.SimulationLauncher` has a SuperLink of its own on this machine,
:class:`~flower_app.deployment.deployed_run.Deployment` takes one that serves real machines. ``flwr run`` exits 0 when
the server app raised and when all clients failed. So what counts is what the run wrote, and whether it still lives.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flower_app.launch.run_check import RunCheck
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


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """A Flower app that is ready to run."""

    run_dir: Path
    """Where the server app writes ``summary.json`` when it is done; programs' output goes to its ``logs``."""
    app: Path
    """Folder of the Flower app."""
    run_config: Path
    """TOML file that overrides the app's configuration."""
    num_clusters: int
    """As many nodes are there."""
    clusters_at_once: int = 0
    """Most that train at the same time: a simulation has a process of Flower's for each of those; 0: all."""
    joins_ray: bool = False
    """Whether the app's simulation joins a Ray that is there, so that it can start early."""
    shared_actors: Sequence[str] = ()
    """Names of the actors that devices and control units of a simulation will share."""
    worker_imports: Sequence[str] = ()
    """Modules of libraries that all actors of a simulation need, imported once."""
    actor_idle_s: float = 0.0
    """How long they live without work [s]."""
    check: RunCheck | None = None
    """Of ``run_config``, for a launcher whose programs can make it; until then nobody has."""
    begin: Callable[[], None] = lambda: None
    """Called once before the app begins, by a launcher that has something to start until then; an error ends the
    launch."""
    watch: Callable[[], None] = lambda: None
    """Called after each poll, to show progress."""
    finished: Callable[[], None] = lambda: None
    """Called once a run has finished, by a launcher whose programs take a while to end: work that can be done until
    then."""
    say: Callable[[str], None] = lambda text: None
    """Told what the user may have to look after while the run goes on."""
    poll_s: float = 0.5
    """Time between polls [s]."""
    inherited_fds: Sequence[int] = ()
    """Descriptors that stay open as long as any process of the run on this machine."""

    @property
    def flower(self) -> Path:
        """Folder of what the run's Flower programs need; removed when it has finished."""
        return self.run_dir / "flower"

    @property
    def logs(self) -> Path:
        """Folder of what the run's programs print."""
        return self.run_dir / "logs"

    def outcome(self) -> Outcome | None:
        """Read how the run ended; None while it has not."""
        summary = read_summary(self.run_dir)
        if summary is None:
            return None
        return Outcome(str(summary.get("status")), str(summary.get("error", "")), summary)

    def conclude(self, outcome: Outcome) -> Outcome:
        """Leave the run directory as a run leaves it that ended so: with a summary, whoever has to write it."""
        if outcome.status == FINISHED:
            # After a failure it may tell why.
            shutil.rmtree(self.flower, ignore_errors=True)
        elif read_summary(self.run_dir) is None and not is_served(self.run_dir):
            write_summary(self.run_dir, outcome.status, error=outcome.error)
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
