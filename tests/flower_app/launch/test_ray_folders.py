"""Folders of Ray: each simulation's own goes with it, and those of killed runs with the next one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from client_pipeline.runtime.ray.ray_folder import LOCK, folder_for_ray, short_folder
from flower_app.launch.processes import MARK, is_alive
from flower_app.launch.ray_folders import end_abandoned_runs

RUN = """
import os, subprocess, sys, time
from flower_app.launch.processes import MARK
from client_pipeline.runtime.ray.ray_folder import folder_for_ray
with folder_for_ray(sys.argv[1]) as folder:
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(program, env=os.environ | {MARK: str(folder)}, start_new_session=True)
    print(folder, child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_next_start_ends_what_a_killed_run_left_and_no_other_run(tmp_path):
    assert MARK not in os.environ
    runs = [
        subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    pids = []
    try:
        (killed, orphan), (running, kept) = (run.stdout.readline().split() for run in runs)
        pids += [int(orphan), int(kept)]
        runs[0].send_signal(signal.SIGKILL)
        runs[0].wait()
        end_abandoned_runs(tmp_path)
        assert [is_alive(pid) for pid in pids] == [False, True]
        assert not os.path.exists(killed) and os.path.isdir(running)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for run in runs:
            run.kill()
            run.wait()
            run.stdout.close()


def test_the_folder_of_a_run_goes_with_it(tmp_path):
    with folder_for_ray(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        end_abandoned_runs(tmp_path)
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_what_is_no_folder_of_a_run_stays(tmp_path):
    (tmp_path / "collapipe-without-lock").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".lock").touch()
    (tmp_path / "collapipe-link").symlink_to(tmp_path / "theirs")
    (tmp_path / "collapipe-linked-lock").mkdir()
    (tmp_path / "collapipe-linked-lock" / ".lock").symlink_to(tmp_path / "theirs" / ".lock")
    (tmp_path / "collapipe-file").touch()
    # A finished run, in the directory that its user named, and folders that ``mkdtemp`` did not make for this user.
    for name, file, mode in (
        ("collapipe-x", ".lock", 0o755),
        ("collapipe-trial_01", ".lock", 0o700),
        ("collapipe-another-name", LOCK, 0o700),
        ("collapipe-open0123", LOCK, 0o755),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        (tmp_path / name / file).touch()
    before = sorted(tmp_path.rglob("*"))
    end_abandoned_runs(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize(("owner", "is_removed"), [(0, True), (4_321, False)])
def test_a_folder_of_another_user_stays(tmp_path, owner, is_removed):
    folder = tmp_path / "collapipe-0123abc_"
    folder.mkdir(mode=0o700)
    (folder / LOCK).touch()
    os.chown(folder, owner, owner)
    end_abandoned_runs(tmp_path)
    assert folder.exists() != is_removed


def test_a_long_folder_without_another_is_refused_by_its_variable(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 27)
    with pytest.raises(ValueError, match="TMPDIR: /t+: expected a path of at most 20 bytes, found 28"):
        short_folder()
