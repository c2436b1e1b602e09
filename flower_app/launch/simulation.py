"""Launching a run in simulation, on this machine, and watching its processes from start to end.

A killed simulation shows as running for a minute: so the launcher looks at the processes themselves.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress

from flower_app.launch.launcher import LaunchOrder, Outcome, last_error
from flower_app.launch.processes import interruptible, is_alive
from flower_app.launch.simulation_superlink import SIMULATION
from flower_app.launch.stopped_process import GIVE_UP_S, StoppedProcess
from flower_app.launch.superlink import PrivateSuperLink
from flower_app.runs.run_directory import FAILED, FINISHED, INTERRUPTED, write_summary

_LAST_WORDS_S = 2.0
"""Time for a summary to appear after the processes ended [s]."""
_SUBMISSION_S = 300.0
_LOG_S = 60.0
"""Time for a finished simulation to end by itself, so that its log is whole [s]."""
_STOP_S = 30.0
"""Time for a simulation to end whose run was stopped [s]: Flower's own end of it may hang."""
_PORTS = 5
"""Ports that are tried for the SuperLink."""


class SimulationLauncher:
    """Launches runs with a SuperLink of their own, whose nodes are simulated here."""

    def launch(self, order: LaunchOrder) -> Outcome:
        """Run a Flower app to its end; see :meth:`flower_app.launch.launcher.Launcher.launch`.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C, SIGTERM and SIGHUP, after all processes were ended.
        """
        order.logs.mkdir(exist_ok=True)
        try:
            with interruptible():
                for attempt in range(_PORTS):
                    superlink = PrivateSuperLink(order.flower, order.logs)
                    with closing(superlink):
                        superlink.start(order)
                        if attempt == 0:
                            order.begin()
                        superlink.let_begin()
                        outcome = _follow(superlink, order)
                        if outcome.status == FINISHED:
                            # Who is asked to end meanwhile has finished.
                            with suppress(KeyboardInterrupt):
                                order.finished()
                            superlink.pass_log_on(_LOG_S)
                    # The port was free when it was chosen.
                    if not superlink.lost_its_port or attempt == _PORTS - 1:
                        break
        except KeyboardInterrupt:
            # The server app may have written that it was killed; that was us.
            write_summary(order.run_dir, INTERRUPTED, error="interrupted")
            raise
        return order.conclude(outcome)


def _follow(superlink: PrivateSuperLink, order: LaunchOrder) -> Outcome:
    """Poll until there is a summary, or nobody left to write one."""
    simulation: int | None = None
    started = time.monotonic()
    pause = StoppedProcess("simulation", f"after {GIVE_UP_S:g} s the run ends", order.say)
    leftover = _Leftover(superlink)
    while True:
        order.watch()
        if outcome := order.outcome():
            return outcome
        assert superlink.processes is not None
        simulation = simulation or superlink.processes.find(SIMULATION)
        reason = _death(superlink, simulation, time.monotonic() - started)
        reason = reason or pause.reason(simulation) or leftover.reason()
        if reason:
            return _last_words(superlink, order, reason)
        time.sleep(order.poll_s)


def _death(superlink: PrivateSuperLink, simulation: int | None, waited_s: float) -> str:
    """Why no summary can come any more; empty if one can."""
    assert superlink.server is not None and superlink.submission is not None
    if superlink.server.poll() is not None:
        return f"the SuperLink ended with exit code {superlink.server.returncode}; see {superlink.superlink_log}"
    if superlink.lost_its_ray:
        return "the simulation's Ray ended, and the devices with it"
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


class _Leftover:
    """Notices a simulation that is still there long after its run was stopped."""

    def __init__(self, superlink: PrivateSuperLink) -> None:
        self._superlink = superlink
        self._look_at: float | None = None

    def reason(self) -> str:
        """Why nobody waits for it any more; empty as long as it may end, or its run goes on."""
        assert self._superlink.submission is not None
        # The log of a run that is stopped ends; that of one that goes on may break off.
        if self._superlink.submission.poll() is None:
            return ""
        now = time.monotonic()
        if self._look_at is not None and now > self._look_at and self._superlink.run_was_stopped():
            return "the run was stopped, and its simulation did not end"
        if self._look_at is None or now > self._look_at:
            self._look_at = now + _STOP_S
        return ""


def _last_words(superlink: PrivateSuperLink, order: LaunchOrder, reason: str) -> Outcome:
    """Wait for a summary written at the last moment, and for the log to arrive."""
    deadline = time.monotonic() + _LAST_WORDS_S
    error = ""
    while time.monotonic() < deadline:
        if outcome := order.outcome():
            return outcome
        error = last_error(superlink.simulation_log)
        assert superlink.submission is not None
        if superlink.submission.poll() is not None and error:
            break
        time.sleep(0.1)
    if not error and superlink.run_was_stopped():
        return Outcome(INTERRUPTED, "stopped by flwr stop")
    cause = f"{reason}: {error}" if error else reason
    return Outcome(FAILED, f"{cause}; see {superlink.simulation_log}")
