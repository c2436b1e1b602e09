"""One server app writes a run directory, one run uses a node, and both are free again when their holder is killed."""

import json
import signal
import subprocess
import sys

import pytest
from flwr.app import Context, RecordDict

from flower_app import server_app
from flower_app.config.run_config import RunConfig
from flower_app.launch.single_run import continued_run
from flower_app.runs.run_directory import read_summary, write_config
from flower_app.training.prepared_run import prepare
from flower_app.training.training_run import train_prepared
from helpers.saved_runs import TWO_CLUSTERS

pytestmark = pytest.mark.slow

SERVER = """
import sys
from flwr.app import Context, RecordDict
from flower_app.server_app import app

class Nodes:
    def get_node_ids(self):
        print("waits", flush=True)
        return []

run_config = {"run-dir": sys.argv[1]}
app(Nodes(), Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config))
"""
"""A server app as a SuperLink starts it: no child of the command, and its nodes do not come."""


class NoNodes:
    """A grid that nobody may ask while another run goes on."""

    def get_node_ids(self):
        raise AssertionError("a second server app has begun")


def refusal(call, *arguments):
    """Return the refusal of a call; empty if there is none, or an error other than the user's mistake."""
    try:
        call(*arguments)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    except AssertionError as error:
        return f"no refusal: {error}"
    return ""


def serve(run_dir):
    context = Context(run_id=2, node_id=0, node_config={}, state=RecordDict(), run_config={"run-dir": str(run_dir)})
    server_app.app(NoNodes(), context)


def contents(run_dir):
    return {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file() and "lock" not in p.name}


def start_server(run_dir):
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    while (line := process.stdout.readline()) and "waits" not in line:
        pass
    assert line, "the server app has not begun"
    return process


@pytest.mark.timeout(300)
def test_a_second_server_app_does_not_write_the_directory_of_one_that_lives(tmp_path):
    """A deployed run's lock was that of the command that follows it: killed, it let a second run in."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(run_dir, RunConfig(run_dir=str(run_dir)))
    server = start_server(run_dir)
    try:
        before = contents(run_dir)
        for said in (refusal(continued_run, str(run_dir)), refusal(serve, run_dir)):
            assert "this run is still going" in said
        assert read_summary(run_dir) is None
        assert contents(run_dir) == before
    finally:
        server.kill()
        server.wait()
    assert server.returncode == -signal.SIGKILL
    # Its lock has died with it.
    assert "no checkpoint" in refusal(continued_run, str(run_dir))
    assert "a second server app has begun" in refusal(serve, run_dir)


class Nodes(NoNodes):
    """Seven nodes that answer nothing."""

    def get_node_ids(self):
        return [7, 8]

    def push_messages(self, messages):
        raise AssertionError("a second run's messages have gone out")


HOLDER = """
import json, sys, time
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
from flower_app.config.run_config import RunConfig
from flower_app.training.prepared_run import prepare
from flower_app.training.training_run import train_prepared

# Messages can only be made in a process that Flower runs.
TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1

class Nodes:
    def get_node_ids(self):
        return [8, 9]

    def push_messages(self, messages):
        print("asked", flush=True)
        time.sleep(600)

run_dir = Path(sys.argv[1])
train_prepared(prepare(RunConfig.from_flat(json.loads(sys.argv[2]) | {"run-dir": str(run_dir)}), run_dir), Nodes())
"""


@pytest.mark.timeout(300)
def test_a_second_run_does_not_take_the_nodes_of_one_that_lives(tmp_path, monkeypatch, flower_process):
    """Two runs at once killed each other's control units, round by round."""
    home = tmp_path / "home"
    monkeypatch.setenv("FLWR_HOME", str(home))
    first = tmp_path / "first"
    first.mkdir()
    command = [sys.executable, "-c", HOLDER, str(first), json.dumps(TWO_CLUSTERS)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    config = RunConfig.from_flat(TWO_CLUSTERS | {"run-dir": str(tmp_path)})
    try:
        assert "asked\n" in iter(holder.stdout.readline, "")
        message = refusal(train_prepared, prepare(config, tmp_path), Nodes())
        assert f"node 8 serves another run, {first}" in message
        assert {path.name for path in home.glob("*/*")} == {"8", "9"}
    finally:
        holder.kill()
        holder.wait()
    for _ in range(2):
        assert "messages have gone out" in refusal(train_prepared, prepare(config, tmp_path), Nodes())
    # That of the killed one's other node has gone, too.
    assert not list(home.glob("*/*"))
