"""A Ray for one program: what it is started with, and what is left when it has ended."""

import os
import subprocess
import sys

import pytest
import ray
from ray._private import ray_constants

from client_pipeline.runtime import private_ray as module
from client_pipeline.runtime.private_ray import private_environment, private_ray, without_secrets

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", LOOPBACK)


@pytest.fixture
def started(monkeypatch):
    """What Ray was started with, and the settings and variables that it saw."""
    seen = {"init": [], "shutdown": 0, "read": []}
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)

    def init(**options):
        seen["init"].append(options | {"cluster": ray_constants.ENABLE_RAY_CLUSTER, **variables()})
        if seen.get("error"):
            raise seen["error"]

    def shutdown():
        seen["shutdown"] += 1

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(
        module, "read_settings", lambda: seen["read"].append((ray_constants.ENABLE_RAY_CLUSTER, variables()))
    )
    return seen


def variables():
    return {name: os.environ.get(name) for name in NAMES}


def test_each_ray_has_a_secret_of_its_own_and_the_loopback():
    one, other = private_environment(), private_environment()
    assert one["RAY_AUTH_MODE"] == "token" and one[LOOPBACK] == "0"
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert len(bytes.fromhex(one["RAY_AUTH_TOKEN"])) == module.TOKEN_BYTES


def test_the_secret_of_another_ray_is_dropped_and_nothing_else():
    inherited = dict.fromkeys(NAMES, "x") | {"PATH": "/bin"}
    assert without_secrets(inherited) == {LOOPBACK: "x", "PATH": "/bin"}


def test_ray_is_started_alone_with_its_secret_and_joins_no_cluster(started, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/some/file")
    with private_ray(num_cpus=3, namespace="n") as environment:
        [seen] = started["init"]
        assert seen["address"] == "local" and seen["num_cpus"] == 3 and seen["namespace"] == "n"
        assert seen["include_dashboard"] is False and seen["log_to_driver"] is False
        assert seen["cluster"] is False
        # The file of another secret would come before the new one.
        assert {name: seen[name] for name in NAMES} == {**environment, "RAY_AUTH_TOKEN_PATH": None}
        # Ray reads its settings before it starts.
        assert started["read"] == [(False, {**environment, "RAY_AUTH_TOKEN_PATH": None})]
        # Programs that this one starts are none of Ray's.
        assert variables() == {**dict.fromkeys(NAMES), "RAY_AUTH_TOKEN_PATH": "/some/file"}
    assert started["shutdown"] == 1
    assert ray_constants.ENABLE_RAY_CLUSTER is True
    assert started["read"][1:] == [(True, variables())]


def test_variables_that_were_there_come_back(started, monkeypatch):
    before = dict.fromkeys(NAMES, "mine")
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with private_ray():
        assert variables() == before
    assert variables() == before


def test_a_ray_that_does_not_start_leaves_nothing(started):
    started["error"] = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"), private_ray():
        pass
    assert started["shutdown"] == 1 and ray_constants.ENABLE_RAY_CLUSTER is True
    assert variables() == dict.fromkeys(NAMES)


def test_a_ray_that_runs_here_is_kept(started, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with private_ray() as environment:
        assert environment == {}
    assert started["init"] == [] and started["shutdown"] == 0


A_WORKER_DIES = """
import io, os, signal, sys, time
import ray
from client_pipeline.runtime.private_ray import private_ray

class Short:
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

with private_ray(num_cpus=1):
    real, sys.stderr = sys.stderr, io.StringIO()
    try:
        ray.get(ray.remote(Short).remote().die.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        deadline = time.monotonic() + 60
        while "A worker died" not in sys.stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    print(sys.stderr.getvalue(), file=real)
"""


@pytest.mark.slow
def test_what_ray_says_of_a_worker_that_died_is_not_in_the_programs_output():
    command, environment = [sys.executable, "-c", A_WORKER_DIES], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "" and "A worker died" in done.stderr
