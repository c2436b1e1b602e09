"""A tiny Flower app that is launched like the real one, and what may remain of it."""

import psutil
import tomli_w

from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.simulation import SimulationLauncher

PROJECT = """
[project]
name = "tiny"
version = "0.1.0"
description = "An app for tests"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "collapipe"

[tool.flwr.app.components]
serverapp = "tiny.server:app"
clientapp = "tiny.client:app"

[tool.flwr.app.config]
behave = "well"
run-dir = ""
"""
CLIENT = """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    # Each waits for the other: this ends only if both run at once.
    meeting = Path(context.run_config["run-dir"]) / "meeting"
    meeting.mkdir(exist_ok=True)
    (meeting / str(context.node_id)).touch()
    while len(list(meeting.iterdir())) < 2:
        time.sleep(0.05)
    return Message(RecordDict(), reply_to=message)
"""
SERVER = """
import os
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
from flower_app.runs.run_directory import append_round, write_summary

app = ServerApp()


@app.main()
def main(grid, context):
    run_dir = Path(context.run_config["run-dir"])
    behave = context.run_config["behave"]
    if behave == "raise":
        raise RuntimeError("the oven is cold")
    if behave == "late":
        # In Ray's words: the node itself cannot be delayed so exactly.
        starts = run_dir / "starts"
        starts.open("a").write("x")
        if starts.stat().st_size < 2:
            raise Exception("The current node timed out during startup. This could happen because")
    if behave == "refuse":
        write_summary(run_dir, "bad-input", error="flour: expected some, found none")
        raise SystemExit(1)
    nodes = list(grid.get_node_ids())
    replies = list(grid.send_and_receive([Message(RecordDict(), node, "train") for node in nodes]))
    append_round(run_dir, {"round": 1, "replies": sum(not reply.has_error() for reply in replies), "cwd": os.getcwd()})
    # Until the test lets it go.
    while behave == "hang" and not (run_dir / "released").exists():
        time.sleep(0.1)
    for number in range(200):
        print(f"line {number}", flush=True)
    write_summary(run_dir, "finished", rounds=1)
"""


def write_tiny_app(folder):
    """Write the app's files; returns their folder."""
    (folder / "tiny").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (folder / "tiny" / f"{name}.py").write_text(text)
    return folder


def left_over(run_dir):
    """Processes of a run, found otherwise than the launcher does."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME", "").startswith(str(run_dir)) and process.status() != "zombie":
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def launch_tiny_app(app, run_dir, behave, watch=lambda: None, say=lambda text: None, **more):
    """Launch it; ``behave`` is well, raise, refuse, hang or late, ``more`` other fields of the order."""
    config = run_dir / "config.toml"
    config.write_text(tomli_w.dumps({"behave": behave, "run-dir": str(run_dir)}))
    order = LaunchOrder(run_dir=run_dir, app=app, run_config=config, num_clusters=2, watch=watch, say=say, **more)
    return SimulationLauncher().launch(order)
