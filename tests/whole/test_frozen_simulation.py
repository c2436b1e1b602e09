"""All programs of a simulation stand still for a minute, as on a laptop that slept: it goes on, or says why not."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from flower_app.runs.run_directory import read_rounds, read_summary
from helpers.command_line import sets
from helpers.patience import eventually
from helpers.tiny_app import left_over

pytestmark = pytest.mark.slow

STILL_S = 60.0
ROUNDS = 40


@pytest.mark.timeout(1200)
def test_a_simulation_whose_programs_all_stood_still_goes_on_or_says_why_it_ended(tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = sets(num_rounds=ROUNDS, num_clusters=2, run_dir=run_dir)
    with log.open("wb") as file:
        run = subprocess.Popen([sys.executable, "-m", "flower_app.cli", "run", *options], stdout=file, stderr=file)
    try:
        eventually(lambda: len(read_rounds(run_dir)[0]) >= 2, 300, log.read_text)
        programs = left_over(run_dir)
        kinds = ("flower-superlink", "flwr-simulation", "raylet", "gcs_server")
        assert all(any(kind in command for command in programs.values()) for kind in kinds)
        signal_all(programs, signal.SIGSTOP)
        stood_at = len(read_rounds(run_dir)[0])
        time.sleep(STILL_S)
        assert run.poll() is None and len(read_rounds(run_dir)[0]) == stood_at < ROUNDS
        signal_all(programs, signal.SIGCONT)
        run.wait(600)
    finally:
        run.terminate()
        run.wait(120)
    terminal = log.read_text()
    assert "The simulation (process " in terminal and "lets it go on" in terminal
    summary = read_summary(run_dir)
    if run.returncode == 0:
        assert summary["status"] == "finished" and len(read_rounds(run_dir)[0]) == ROUNDS
    else:
        assert run.returncode == 1 and summary["error"] in terminal and "collapipe run --resume" in terminal
        assert re.search(r"; it had stood still for \d+ s before, and Flower and Ray wait about 30 s", terminal)
    assert left_over(run_dir) == {}


def signal_all(programs, number):
    for pid in programs:
        os.kill(pid, number)
