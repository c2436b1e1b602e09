"""Bytes that are no text, no home, a full disk, closed descriptors: each ends in one line."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from helpers.command_line import sets


def invoked(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["collapipe", *arguments])
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("option", ["--set", "--config", "--resume"])
def test_an_argument_that_is_no_text_is_named(monkeypatch, option):
    done = invoked(monkeypatch, "run", option, os.fsdecode(b"runs-dir=/tmp/\xff"))
    assert done.exit_code == 2
    assert done.output.splitlines() == ["error: b'runs-dir=/tmp/\\xff': expected UTF-8, found other bytes; rename it"]


def test_a_folder_to_work_in_whose_name_is_no_text_is_named(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = invoked(monkeypatch, "run", "--set", "num-rounds=0")
    assert done.exit_code == 2 and "\\xff': expected UTF-8, found other bytes; rename it" in done.output


@pytest.fixture
def homeless(monkeypatch):
    """A user of whom the system knows no home."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name in ("FLWR_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_user_without_a_home_is_told_to_name_one(homeless, monkeypatch):
    done = invoked(monkeypatch, "run", "--superlink", "edge")
    assert done.exit_code == 2
    assert done.output.splitlines() == [
        "error: HOME: no home directory is known of this user; set HOME to a folder of your own"
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("file", [None, "/runs/config.toml"])
def test_a_full_disk_is_one_line(monkeypatch, number, file):
    def full(*arguments, **options):
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr("flower_app.launch.single_run.new_run", full)
    done = invoked(monkeypatch, "run")
    path = f"{file}: " if file else ""
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        f"error: {path}{os.strerror(number)}; make room there, or give another folder (runs-dir, TMPDIR)"
    ]


def with_closed(closed, *arguments):
    """Start the command line without some of the descriptors 0 to 2."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "flower_app.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_change_neither_exit_code_nor_words(closed):
    done = with_closed(closed, "run", "--set", "num-rounds=0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("" if "2>" in closed else "error: num-rounds: expected at least 1, found 0\n")


@pytest.mark.slow
def test_a_run_without_any_descriptor_trains_to_its_end(tmp_path):
    """A log or a socket has the number of one that is closed, and nobody prints into it."""
    run_dir = tmp_path / "run"
    options = sets(num_rounds=1, num_clusters=1, run_dir=run_dir)
    assert with_closed("<&- >&- 2>&-", "run", *options).returncode == 0
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    assert (run_dir / "config.toml").read_text().startswith("name = ")
