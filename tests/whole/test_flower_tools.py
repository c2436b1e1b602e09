"""Flower's own tools on our runs: list, log, stop; the strategy in a ServerApp of one's own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from flower_app.config.run_config import nested
from flower_app.config.sources import load_config
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.simulation import SimulationLauncher
from flower_app.runs.run_directory import read_summary
from helpers.command_line import TINY, sets
from helpers.patience import eventually
from helpers.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FLWR = Path(sys.executable).parent / "flwr"


def flwr(home, *arguments):
    environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run([FLWR, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_listed_shown_and_stopped_by_flowers_commands(tmp_path):
    command = [sys.executable, "-m", "flower_app.cli", "run", *sets(num_rounds=500, scenario="two-clusters")]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        run_dir = tmp_path / "runs" / "latest"

        def has_a_round():
            assert run.poll() is None, run.stderr.read()[-3000:]
            return (run_dir / "checkpoint" / "round-000001").exists()

        eventually(has_a_round, 900)
        # As docs/flower.md has it.
        home = run_dir / "flower" / "home"
        listed = json.loads(re.search(r"^\{.*", flwr(home, "list", "own", "--format", "json"), re.S | re.M)[0])
        (entry,) = listed["runs"]
        assert entry["status"] == "running"
        assert "cluster 0 trains on" in flwr(home, "log", str(entry["run-id"]), "own", "--show")
        flwr(home, "stop", str(entry["run-id"]), "own")
        _, said = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 130, said[-3000:]
    assert read_summary(run_dir)["status"] == "interrupted"
    assert re.search(r"^continue after round \d+: collapipe run --resume \S+-default$", said, re.MULTILINE)


def test_the_strategy_trains_in_a_server_app_of_ones_own(tmp_path):
    """The example of docs/flower.md, as it stands there."""
    text = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ServerApp()" in block)
    app, run_dir = assemble_app(tmp_path / "app", server="my_server:app"), tmp_path / "run"
    (app / "my_server.py").write_text(code)
    project = (app / "pyproject.toml").read_text().replace('["LICENSE", ', '["LICENSE", "my_server.py", ')
    (app / "pyproject.toml").write_text(project)
    for folder in (run_dir / "plans", run_dir / "logs"):
        folder.mkdir(parents=True)
    config = load_config(None, {**TINY, "scenario": "two-clusters", "run-dir": str(run_dir), "num-clusters": 2})
    (tmp_path / "run.toml").write_text(tomli_w.dumps(nested(config.to_flat())))
    order = LaunchOrder(run_dir=run_dir, app=app, run_config=tmp_path / "run.toml", num_clusters=2)
    outcome = SimulationLauncher().launch(order)
    assert outcome.status == "finished", outcome.error
    assert outcome.summary["rounds"] == 3 and outcome.summary["tensors"] > 10
