"""Limits of a machine are named before a run starts, and beside the error that may come from one."""

import os
import re
import resource
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.launch.launcher import Outcome
from flower_app.launch.single_run import NewRun, launch_run, new_run
from flower_app.runs.run_directory import create_run_directory

NONE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """Limits that the system is said to have; all that are set are noted there."""
    values = {
        resource.RLIMIT_NOFILE: (1024, 4096),
        resource.RLIMIT_AS: (NONE, NONE),
        resource.RLIMIT_NPROC: (NONE, NONE),
    }
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", values.__setitem__)
    return values


def refused_run():
    """Begin a run whose configuration is wrong: with a limit that is too low, that comes first."""
    return new_run(None, ["num-rounds=0"])


def test_too_few_open_files_are_named(limits):
    limits[resource.RLIMIT_NOFILE] = (64, 64)
    with pytest.raises(ValueError, match="ulimit -n: expected at least 128 open files, found 64"):
        refused_run()


def test_too_little_address_space_is_named(limits):
    limits[resource.RLIMIT_AS] = (10**9, NONE)
    with pytest.raises(ValueError, match="ulimit -v: expected at least 4 GB of address space, found 1.0 GB; raise it"):
        refused_run()


@pytest.mark.parametrize(("user", "error"), [(1000, "ulimit -u: expected room for 260 proc"), (0, "num-rounds")])
def test_too_few_processes_are_named_except_to_root_whom_the_system_does_not_count(limits, monkeypatch, user, error):
    limits[resource.RLIMIT_NPROC] = (100, 100)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(ValueError, match=error):
        refused_run()


def test_shared_memory_that_cannot_be_written_is_named(limits, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm" and access(path, mode))
    with pytest.raises(ValueError, match="^/dev/shm: expected a folder that is writable, where Ray keeps its objects"):
        refused_run()


@pytest.mark.parametrize("number", [resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_NPROC])
def test_a_limit_is_one_line_of_the_command(limits, monkeypatch, number):
    limits[number] = (64, 64)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["run"])
    assert done.exit_code == 2 and re.fullmatch(r"error: ulimit -[nuv]: expected .*\n", done.output)


@pytest.mark.parametrize(("before", "after"), [((256, 4096), 1024), ((256, NONE), 1024), ((256, 512), 512)])
def test_a_low_number_of_open_files_is_raised_as_far_as_it_may_be(limits, before, after):
    limits[resource.RLIMIT_NOFILE] = before
    with pytest.raises(ValueError, match="num-rounds"):
        refused_run()
    assert limits[resource.RLIMIT_NOFILE] == (after, before[1])


@pytest.mark.parametrize(
    ("error", "is_of_a_limit"),
    [
        ("RuntimeError: can't start new thread", True),
        ("OSError: [Errno 24] Too many open files: 'replan.py'", True),
        ("ImportError: cython_special.so: failed to map segment from shared object", True),
        ("PanicException: Resource temporarily unavailable", True),
        ("Exception: The current node timed out during startup.", True),
        ("every client failed: a device is gone", False),
    ],
)
def test_limits_are_named_beside_an_error_that_may_come_from_one(tmp_path, limits, error, is_of_a_limit):
    limits[resource.RLIMIT_NPROC] = (200, 200)
    run_dir, lines = create_run_directory(tmp_path, "run"), []

    class Failing:
        def launch(self, order):
            return Outcome("failed", error)

    config = replace(RunConfig(), run_dir=str(run_dir), num_clusters=2)
    launch_run(NewRun(run_dir, config), lines.append, Failing())
    [text] = [line for line in lines if line.startswith("error: ")]
    named = "ulimit -n (open files) = 1024, ulimit -u (processes and threads) = 200" in text
    assert error in text and named == is_of_a_limit


def test_a_run_that_goes_on_is_refused_likewise(tmp_path, limits):
    limits[resource.RLIMIT_NOFILE] = (64, 64)
    run_dir = create_run_directory(tmp_path, "run")
    config = replace(RunConfig(), run_dir=str(run_dir), num_clusters=2, resume=True)
    with pytest.raises(ValueError, match="ulimit -n: expected at least 128 open files, found 64"):
        launch_run(NewRun(run_dir, config), lambda text: None)
