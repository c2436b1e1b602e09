"""Launch of a run in simulation on this machine, and the watch over its processes from start to end.

Flower calls a killed simulation running for a minute, so the launcher looks at the processes themselves. One that
stands still as it starts loses its run after half a minute: Flower starts another, and the launcher follows that one.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from client_pipeline.runtime.ray.private_ray import ATTEMPTS, NODE_IS_LATE
from flower_app.launch.launcher import LaunchOrder, Outcome, last_error
from flower_app.launch.processes import interruptible, is_alive, is_stopped
from flower_app.launch.stopped_process import GIVE_UP_S, StoppedProcess
from flower_app.launch.superlink import SIMULATION, PrivateSuperLink, private_superlink
from flower_app.runs.run_directory import FAILED, FINISHED, INTERRUPTED, write_summary
from flower_app.runs.run_logs import SIMULATION_LOG

_LAST_WORDS_S = 2.0
"""Time for a summary to appear after the processes ended [s]."""
_START_S = 300.0
"""Time for the simulation's program to start [s]."""
_START_POLL_S = 0.1
"""Time between polls until then [s]."""
_LOG_S = 60.0
"""Time for a finished simulation to end by itself, so that its log is whole [s]."""
_PENDING, _STOPPED = "pending", "finished:stopped"
"""Flower's statuses of a run that waits for a process, and of one that ``flwr stop`` has ended."""
_STOP_S = 30.0
"""Time for a simulation to end whose run was stopped [s]: Flower's own end of it may hang."""


class SimulationLauncher:
    """Launcher of runs whose nodes are simulated on this machine, behind a SuperLink of their own."""

    def launch(self, order: LaunchOrder) -> Outcome:
        """Run a Flower app to its end; see :meth:`flower_app.launch.launcher.Launcher.launch`."""
        order.logs.mkdir(exist_ok=True)
        try:
            for attempts_left in reversed(range(ATTEMPTS)):
                outcome = _launch_once(order)
                if outcome.summary or NODE_IS_LATE not in outcome.error or not attempts_left:
                    break
                order.say("this machine is busy: Ray's node was not up in Ray's 30 s; the simulation is started again")
                # The error in it is not one of the next start.
                (order.logs / SIMULATION_LOG).unlink(missing_ok=True)
        except KeyboardInterrupt:
            # The server app may have recorded the kill in its summary.
            write_summary(order.run_dir, INTERRUPTED, error="interrupted")
            raise
        return order.conclude(outcome)


def _launch_once(order: LaunchOrder) -> Outcome:
    """Start the run's programs, follow the run to its end, and end the programs."""
    with interruptible(), private_superlink(order) as superlink:
        outcome = _follow(superlink, order)
        if outcome.status == FINISHED:
            # Ignore the interruption: the run has finished.
            with suppress(KeyboardInterrupt):
                order.finished()
            if superlink.submission is not None:
                # Ctrl-C after the end of the run only shortens the log.
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    superlink.submission.wait(_LOG_S)
        return outcome


def _follow(superlink: PrivateSuperLink, order: LaunchOrder) -> Outcome:
    """Poll until there is a summary, or nobody left to write one."""
    simulation: int | None = None
    started = time.monotonic()
    end_words = f"after {GIVE_UP_S:g} s the run ends (Flower may end it after a minute)"
    pause = StoppedProcess("simulation", end_words, order.say)
    looks_at: float | None = None

    def leftover() -> str:
        """Return why nobody waits for a simulation whose run was stopped; empty as long as it may end or go on."""
        nonlocal looks_at
        now = time.monotonic()
        # The end of flwr run does not prove a stopped run: it may lose the log of one that continues.
        if superlink.submission is None or superlink.submission.poll() is None or (looks_at and now <= looks_at):
            return ""
        is_due, looks_at = looks_at is not None, now + _STOP_S
        is_stop = is_due and superlink.run_status() == _STOPPED
        return "the run was stopped, and its simulation did not end" if is_stop else ""

    def end() -> Outcome | None:
        nonlocal simulation
        superlink.submit_when_healthy()
        if simulation is None or not is_alive(simulation) or is_stopped(simulation):
            simulation = superlink.processes.find(SIMULATION) or simulation
        reason = _death(superlink, simulation, time.monotonic() - started)
        if reason := reason or pause.reason(simulation) or leftover():
            return _last_words(superlink, order, reason)
        time.sleep(order.poll_s if simulation else min(order.poll_s, _START_POLL_S))
        return None

    return order.follow(end, pause)


def _death(superlink: PrivateSuperLink, simulation: int | None, waited_s: float) -> str:
    """Return why no summary can come any more; empty if one can."""
    if superlink.server.poll() is not None:
        return f"the SuperLink ended with exit code {superlink.server.returncode}; see {superlink.superlink_log}"
    if simulation is not None:
        # By now flwr run only forwards the log: the run continues without it.
        if is_alive(simulation) or (waited_s <= _START_S and superlink.run_status() == _PENDING):
            return ""
        return "" if superlink.processes.find(SIMULATION) else "the simulation ended without a result"
    if superlink.submission is not None and superlink.submission.poll() is not None:
        if superlink.submission.returncode:
            return "flwr run did not accept the app"
        return "the simulation ended without a result"
    if waited_s > _START_S:
        return f"no simulation started within {_START_S:.0f} s; see {superlink.superlink_log}"
    return ""


def _last_words(superlink: PrivateSuperLink, order: LaunchOrder, reason: str) -> Outcome:
    """Wait for a summary written at the last moment, and for the log to arrive."""
    submission = superlink.submission
    if outcome := order.last_outcome(
        _LAST_WORDS_S,
        lambda: submission is not None and submission.poll() is not None and bool(last_error(superlink.simulation_log)),
    ):
        return outcome
    error = last_error(superlink.simulation_log)
    if not error and superlink.run_status() == _STOPPED:
        return Outcome(INTERRUPTED, "stopped by flwr stop")
    cause = f"{reason}: {error}" if error else reason
    return Outcome(FAILED, f"{cause}; see {superlink.simulation_log}")
