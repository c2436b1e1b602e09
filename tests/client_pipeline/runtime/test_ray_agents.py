"""What stands where Ray starts two agents beside each raylet: what it says, when it becomes one, and when it ends."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from client_pipeline.runtime import ray_agents

FILE = ray_agents.__file__
AS_RAY = [sys.executable, "-I", "-S", FILE, sys.executable, "-u"]
"""How the command of a node's agent begins."""
FAKE_AGENT = """
import json, socket, sys
# As a library does to see what this machine can.
with socket.socket() as other:
    other.bind(("127.0.0.1", 0))
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
with socket.socket() as server:
    server.bind((options["node-ip-address"], int(options["runtime-env-agent-port"])))
    server.listen()
    reached, _ = server.accept()
    with reached:
        asked = reached.recv(99)
        reached.sendall(json.dumps([asked.decode(), sys.argv, sys.path[0], __name__]).encode())
"""
RAYLET = """
import json, os, subprocess, sys, time
command = json.loads(sys.argv[1])
agent = subprocess.Popen(command, env={**os.environ, "RAY_RAYLET_PID": str(os.getpid())})
print(agent.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def raylet(tmp_path):
    """Start a process that starts what stands for an agent; yields what does so, and the agent's folder."""
    started, agents = [], []

    def start(*command):
        options = [f"--session-dir={tmp_path}", "--node-id=n0"]
        words = json.dumps([*AS_RAY, *command, *options])
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", RAYLET, words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        agents.append(psutil.Process(int(started[-1].stdout.readline())))
        return started[-1], agents[-1]

    yield start
    for process in (*started, *agents):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        process.communicate(timeout=60)


def content(path, agent):
    """What a file says, once it is there."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline and agent.is_running()
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.slow
def test_a_dashboard_that_is_not_installed_has_no_ports_and_its_agent_ends_with_the_raylet(raylet, tmp_path):
    process, agent = raylet("/no/such/agent.py", "--grpc-port=7", "--minimal", "--head")
    for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
        assert content(tmp_path / f"{name}_n0", agent) == "-1"
    assert agent.memory_full_info().uss < 20e6 and agent.num_threads() == 1
    process.kill()
    agent.wait(timeout=60)
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.slow
def test_without_the_systems_help_it_looks_for_its_raylet(tmp_path):
    script = f"""
import os, runpy, sys
del os.pidfd_open
sys.argv = [{FILE!r}, *sys.argv[1:]]
runpy.run_path({FILE!r}, run_name="__main__")
"""
    words = ["/no/such/agent.py", "--minimal", f"--session-dir={tmp_path}", "--node-id=n0"]
    command = [sys.executable, "-c", script, sys.executable, *words]
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET, json.dumps(command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    agent = psutil.Process(int(raylet.stdout.readline()))
    try:
        assert content(tmp_path / "metrics_agent_port_n0", agent) == "-1"
    finally:
        raylet.kill()
        raylet.communicate(timeout=60)
    agent.wait(timeout=60)


@pytest.mark.slow
def test_an_installed_dashboard_has_its_own_agent(raylet, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text("import sys, time\nprint(sys.argv[1:], file=open(sys.argv[1] + '/out', 'w'))\ntime.sleep(60)\n")
    _, agent = raylet(str(script), str(tmp_path))
    assert content(tmp_path / "out", agent).startswith(f"['{tmp_path}', '--session-dir=")


@pytest.mark.slow
def test_whoever_connects_first_reaches_the_agent_of_environments_itself(raylet, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(FAKE_AGENT)
    options = ["--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0"]
    _, agent = raylet(str(script), *options)
    port = int(content(tmp_path / "runtime_env_agent_port_n0", agent))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as asking:
        asking.sendall(b"an order")
        asked, arguments, modules, name = json.loads(asking.makefile().read())
    assert asked == "an order" and modules == str(tmp_path) and name == "__main__"
    assert arguments[:3] == [str(script), *options] and arguments[-1] == f"--runtime-env-agent-port={port}"


@pytest.mark.slow
def test_the_agent_of_environments_ends_with_the_raylet_and_lets_its_port_go(raylet, tmp_path):
    process, agent = raylet("/no/such/main.py", "--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0")
    port = int(content(tmp_path / "runtime_env_agent_port_n0", agent))
    process.kill()
    agent.wait(timeout=60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
