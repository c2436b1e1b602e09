"""Folders of Ray: each simulation's own goes with it, and those of killed runs with the next one."""

import os
import signal
import subprocess
import sys

import pytest

from flower_app.launch.ray_folders import RayFolder, remove_abandoned

RUN = """
import sys, time
from flower_app.launch.ray_folders import RayFolder
folder = RayFolder(sys.argv[1])
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_folder_of_a_killed_run_goes_when_the_next_begins_and_that_of_a_running_one_stays(tmp_path):
    """A run that was killed together with its guard left its folder in the folder for temporary files for good."""
    runs = [
        subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, running = (run.stdout.readline().strip() for run in runs)
        runs[0].send_signal(signal.SIGKILL)
        runs[0].wait()
        folder = RayFolder(tmp_path)
        assert not os.path.exists(killed)
        assert os.path.isdir(running) and folder.path.is_dir()
        folder.close()
        assert not folder.path.exists()
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdout.close()


def test_what_is_no_folder_of_a_run_stays(tmp_path):
    (tmp_path / "collapipe-without-lock").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".lock").touch()
    (tmp_path / "collapipe-link").symlink_to(tmp_path / "theirs")
    (tmp_path / "collapipe-linked-lock").mkdir()
    (tmp_path / "collapipe-linked-lock" / ".lock").symlink_to(tmp_path / "theirs" / ".lock")
    (tmp_path / "collapipe-file").touch()
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
