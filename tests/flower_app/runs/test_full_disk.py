"""A full disk: how a run ended is said all the same, in one line."""

import errno
import os

import pytest
from typer.testing import CliRunner

from client_pipeline import durable
from flower_app.cli.main import app
from helpers.saved_runs import SMALL, saved_run


def outcome_of(call):
    try:
        return call()
    except OSError as error:
        return error


@pytest.mark.parametrize("name", ["report.html", "plan.json"])
def test_a_full_disk_is_said_with_the_file_that_did_not_fit(tmp_path, name):
    """A write to an open file names none: "No space left on device; make room there"."""

    def write(path):
        path.write_text("half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    error = outcome_of(lambda: durable.write_file(tmp_path / name, write))
    assert (error.errno, error.filename) == (errno.ENOSPC, str(tmp_path / name)) and not list(tmp_path.iterdir())


def test_an_export_to_a_full_disk_ends_in_one_line(tmp_path, monkeypatch):
    """The weights' library has an error of its own for it."""
    from safetensors import SafetensorError

    from flower_app.exported import library_folder

    run_dir = saved_run(
        {**SMALL, "model.family": "bert", "task.name": "sequence-classification", "runs-dir": str(tmp_path / "runs")}
    )

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(library_folder, "save_file", full)
    result = CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "exported")])
    assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith("error: ")
    assert "exported: cannot be written: " in result.stderr and "No space left on device" in result.stderr
    assert "make room" in result.stderr and [path.name for path in tmp_path.iterdir()] == ["runs"]
