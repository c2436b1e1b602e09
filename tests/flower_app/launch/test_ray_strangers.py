"""No stranger speaks to a simulation's Ray, and nobody outside this machine hears of it."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest

from flower_app.runs.run_directory import read_rounds
from helpers.repository import ROOT
from helpers.signals import default_signals
from helpers.tiny_app import launch_tiny_app, left_over, write_tiny_app

STRANGER = """
import sys
import ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "I am in").remote(), timeout=240))
"""
CALLS = {
    "gcs_server": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
}
"""A harmless call of each of Ray's programs."""


def listeners(pids):
    """Sockets on which processes listen: (command line, address, port)."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            sockets = process.net_connections("inet")
        except psutil.Error:
            continue
        found += [(command, one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]
    return found


def call(port, method, token=None):
    """Status of a raw call of one of Ray's services."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=120, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def stranger(address):
    """Join a Ray as somebody else's program does, who knows the address alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    short = {"RAY_gcs_server_request_timeout_seconds": "5", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    # Otherwise it looks for a loopback address at the machine's other one.
    short["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", STRANGER, address]
    return subprocess.run(command, env=environment | short, capture_output=True, text=True, timeout=300)


def check_family(pids, token):
    """Every socket is on a loopback address, and every one of Ray's programs refuses who has no token."""
    heard = listeners(pids)
    assert [row for row in heard if row[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []
    for program, method in CALLS.items():
        ports = [port for command, _, port in heard if program in command.split(" ")[0]]
        assert ports, program
        assert "OK" not in {call(port, method) for port in ports}, program
        assert "OK" not in {call(port, method, "0" * 64) for port in ports}, program
        # The call is one that Ray answers: what refuses a stranger is the token alone.
        assert "OK" in {call(port, method, token) for port in ports}, program
    [address] = [f"127.0.0.1:{port}" for command, _, port in heard if "gcs_server" in command.split(" ")[0]]
    attempt = stranger(address)
    assert "I am in" not in attempt.stdout and attempt.returncode != 0
    assert "InvalidAuthToken" in attempt.stderr


@pytest.mark.slow
def test_a_stranger_is_refused_while_a_simulation_goes_on_and_ends_as_if_nobody_had_come(tmp_path):
    """The Ray of a simulation listened on every address of the machine: whoever had its address ran code as the user.

    Runs that share a simulation have the same launcher.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    tokens = []

    def knock():
        if read_rounds(run_dir)[0] and not tokens:
            family = left_over(run_dir)
            tokens.append({psutil.Process(pid).environ().get("RAY_AUTH_TOKEN") for pid in family})
            check_family(family, *tokens[0])
            (run_dir / "released").touch()

    outcome = launch_tiny_app(write_tiny_app(tmp_path / "app"), run_dir, "hang", knock)
    assert outcome.exit_code == 0, outcome.error
    assert len(tokens[0]) == 1 and len(tokens[0].pop()) == 64


@pytest.mark.slow
def test_no_program_of_the_project_starts_a_ray_that_anybody_may_join():
    """Ray starts with a secret, made in one place; everywhere else it is joined by its address."""
    files = [
        path
        for folder in ("client_pipeline", "strategies", "flower_app", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    starts = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init":
                addresses = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "address"]
                if addresses in ([], ["'local'"]):
                    starts.append(path.relative_to(ROOT).as_posix())
        # Flower starts a Ray with what it finds in the environment.
        text = path.read_text(encoding="utf-8")
        if "import run_simulation" in text and path != Path(__file__).resolve():
            assert "private_environment()" in text or "prepare_private_ray()" in text, path
    assert starts == ["client_pipeline/runtime/ray/private_ray.py"]


COMMANDS = {
    "verify": (["--segments", "4", "--micro-batches", "2", "--batch-size", "2"], lambda answer: answer["passed"]),
    "profile": (["--length", "8", "--batch-size", "4", "--devices", "1"], lambda answer: len(answer["devices"]) == 1),
}
"""Options of the commands that compare and measure on this machine, and whether one has done its work."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_starts_refuses_a_stranger_and_passes(tmp_path, name):
    """The commands that compare and measure on this machine have a Ray of their own, as runs have."""
    options, is_done = COMMANDS[name]
    out = ["--out", "here.toml"] if name == "profile" else []
    line = [sys.executable, "-m", "flower_app.cli", name, *options, *out, "--json"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True, preexec_fn=default_signals) as command:
        doors = []
        while command.poll() is None and not doors:
            time.sleep(0.1)
            family = [child.pid for child in psutil.Process(command.pid).children(recursive=True)]
            heard = [row for row in listeners(family) if "gcs_server" in row[0].split(" ")[0]]
            # It takes callers from the moment that it refuses one.
            doors = [row for row in heard if call(row[2], CALLS["gcs_server"]) == "UNAUTHENTICATED"]
        [(_, address, port)] = doors
        assert address in ("127.0.0.1", "::ffff:127.0.0.1")
        # It waits until the stranger has tried.
        os.kill(command.pid, signal.SIGSTOP)
        try:
            attempt = stranger(f"127.0.0.1:{port}")
        finally:
            os.kill(command.pid, signal.SIGCONT)
        assert "I am in" not in attempt.stdout and attempt.returncode != 0
        assert "InvalidAuthToken" in attempt.stderr
        assert is_done(json.loads(command.communicate(timeout=300)[0]))
