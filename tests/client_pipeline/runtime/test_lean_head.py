"""A head of Ray starts without the programs that no cluster of ours asks for anything."""

import os
import subprocess
import sys

import pytest
from ray._private import ray_constants, services
from ray._private.node import Node

from client_pipeline.runtime import ray_agents, ray_program, worker_forks
from client_pipeline.runtime.private_ray import lean_head
from helpers.repository import ROOT

UNUSED = ("start_monitor", "start_api_server", "start_ray_client_server", "start_log_monitor")


def test_the_installed_ray_starts_them_by_the_methods_that_are_left_out_and_has_them_again_afterwards():
    originals = {name: vars(Node)[name] for name in UNUSED}
    with pytest.raises(KeyError), lean_head(shows_output=False):
        node = object.__new__(Node)
        assert node.start_monitor() is node.start_ray_client_server() is node.start_log_monitor() is None
        assert node.start_api_server(include_dashboard=False, raise_on_failure=False) is None
        raise KeyError("what happens within")
    assert {name: vars(Node)[name] for name in UNUSED} == originals


def test_what_workers_print_is_looked_for_where_a_driver_may_ask_for_it():
    original = vars(Node)["start_log_monitor"]
    with lean_head():
        assert vars(Node)["start_log_monitor"] is original


@pytest.mark.parametrize(("system", "forks"), [("linux", True), ("darwin", False)])
def test_its_workers_are_forks_on_linux_alone(system, forks, monkeypatch):
    class Settings:
        worker_path = setup_worker_path = "ray's"

    started = []
    monkeypatch.setattr(Node, "start_raylet", lambda node, *arguments, **options: started.append((arguments, options)))
    monkeypatch.setattr(sys, "platform", system)
    node = object.__new__(Node)
    node._ray_params = Settings()
    with lean_head():
        node.start_raylet("a", b=1)
    assert started == [(("a",), {"b": 1})]
    paths = {node._ray_params.worker_path, node._ray_params.setup_worker_path}
    assert paths == ({worker_forks.__file__} if forks else {"ray's"})


@pytest.mark.parametrize(("options", "waiting"), [({}, 2), ({"environments": True}, 1)])
def test_its_agents_wait_but_for_one_that_is_needed_at_once(options, waiting):
    def commands():
        components = ("dashboard_agent", "runtime_env_agent", "dashboard")
        return [services._build_python_executable_command_memory_profileable(name, "/s") for name in components]

    of_ray = commands()
    with lean_head(**options):
        started = commands()
    ahead = [sys.executable, "-I", "-S", ray_agents.__file__]
    assert started == [[*ahead, *command] for command in of_ray[:waiting]] + of_ray[waiting:]
    assert commands() == of_ray
    assert {ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT} == {
        "dashboard_agent",
        "runtime_env_agent",
    }


def test_its_workers_have_one_heap_each_unless_the_environment_says_how_many(monkeypatch):
    for said, expected in ((None, "1"), ("4", "4")):
        monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
        if said:
            monkeypatch.setenv("MALLOC_ARENA_MAX", said)
        with lean_head():
            assert os.environ["MALLOC_ARENA_MAX"] == expected
        assert os.environ.get("MALLOC_ARENA_MAX") == said


def test_rays_command_gets_the_arguments_and_starts_such_a_head(monkeypatch):
    import ray.scripts.scripts as scripts

    seen = []
    monkeypatch.setattr(sys, "argv", ["ray", "start", "--head"])
    monkeypatch.setattr(scripts, "main", lambda: seen.append((sys.argv[1:], vars(Node)["start_monitor"].__name__)))
    ray_program.main()
    assert seen == [(["start", "--head"], "<lambda>")]
    assert vars(Node)["start_monitor"].__name__ == "start_monitor"


@pytest.mark.slow
def test_rays_command_starts_without_the_libraries_of_its_other_commands():
    script = """
import sys
from client_pipeline.runtime import ray_program
sys.argv = ["ray", "start", "--help"]
try:
    ray_program.main()
finally:
    print(sorted({"pandas", "fastapi", "ray.data"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--head" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_head_that_was_started_so_has_no_server_of_ray_client(local_ray, ray_secret):
    import psutil

    commands = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    names = " ".join(" ".join(command) for command in commands)
    assert "raylet" in names and "gcs_server" in names
    assert (
        "ray.util.client.server" not in names
        and "dashboard.py" not in names
        and "autoscaler/_private/monitor.py" not in names
        # Nobody asks this Ray for what its workers print.
        and "log_monitor.py" not in names
        and sum(ray_agents.__file__ in command for command in commands) == 2
        and "ray::DashboardAgent" not in names
    )
