"""A run that ends because all of it stood still, as on a laptop that slept, says so."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flower_app.launch import simulation, stopped_process
from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.simulation import SimulationLauncher
from flower_app.launch.stopped_process import StoppedProcess
from flower_app.runs.run_directory import write_summary
from helpers.clocks import Clock


class Ended:
    """A SuperLink whose simulation has ended without a result."""

    def __init__(self, logs):
        alive = iter([2**30])
        self.processes = SimpleNamespace(find=lambda program: next(alive, None))
        self.server = SimpleNamespace(poll=lambda: None)
        self.submission = SimpleNamespace(poll=lambda: None, returncode=0)
        self.simulation_log = self.superlink_log = logs / "simulation.log"

    def submit_when_healthy(self):
        pass

    def run_status(self):
        return "finished:failed"


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Launch a run that ends after its first poll, between which and the start some seconds pass."""

    def launch(seconds, status=""):
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        clock, lines = [1000.0], []

        def watch():
            clock[0] += seconds
            if status and len(lines) > 0:
                write_summary(run_dir, status, error="every client failed")

        monkeypatch.setattr(time, "clock_gettime", lambda number: clock[0])
        monkeypatch.setattr(simulation, "private_superlink", lambda order: nullcontext(Ended(order.logs)))
        monkeypatch.setattr(simulation, "_LAST_WORDS_S", 0.05)
        # It is found dead at the second look.
        looks = iter([True])
        monkeypatch.setattr(simulation, "is_alive", lambda process: next(looks, False))
        order = LaunchOrder(
            run_dir=run_dir, app=run_dir, run_config=run_dir, num_clusters=1, watch=watch, say=lines.append, poll_s=0.01
        )
        return SimulationLauncher().launch(order), lines

    return launch


def test_a_run_that_ended_after_a_standstill_says_so(launched):
    """All its programs were stopped for a minute: it ended with "the simulation ended without a result"."""
    outcome, lines = launched(60.0)
    assert outcome.status == "failed" and "it had stood still for 60 s before" in outcome.error
    assert [line for line in lines if "stood still for 60 s" in line and "--resume" in line]


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_what_the_server_app_wrote_of_it_has_the_reason_too(launched, status):
    outcome, _ = launched(60.0, status)
    assert outcome.status == status and "it had stood still for 60 s before" in outcome.error


def test_a_run_that_ended_without_one_does_not(launched):
    outcome, lines = launched(0.5)
    assert outcome.error.startswith("the simulation ended without a result") and "stood still" not in outcome.error
    assert lines == []


def test_a_run_whose_simulation_stood_still_alone_says_so_too(monkeypatch):
    """Flower had given it up meanwhile, and the run "ended without a result"."""
    clock, states = Clock(), iter([True, True, False])
    monkeypatch.setattr(stopped_process, "time", clock)
    monkeypatch.setattr(stopped_process, "is_stopped", lambda pid: next(states))
    pause = StoppedProcess("simulation", "then it ends", lambda text: None)
    for _ in range(2):
        assert pause.reason(7) == "" == pause.cause()
        clock.sleep(20.0)
    assert pause.reason(7) == "" and pause.cause().startswith("; it had stood still for 40 s before, and Flower")
