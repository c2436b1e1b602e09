"""A run whose server is killed in the middle of a round goes on as if nothing had happened, bit for bit.

So does a control unit alone, with what a run does not have here: adapters, and a head of its own.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file

from client_pipeline.families.families import build_parts
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.control_unit.round_order import RoundOrder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.command_line import collapipe, collapipe_here, rounds, sets
from helpers.federated_rounds import control_units
from helpers.patience import eventually
from helpers.tiny_models import tiny_batch, tiny_spec

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 3
devices = 2
channels = 2
seed = 5
[device]
flop-per-cycle = { min = 10.0, max = 24.0 }
frequency-ghz = { min = 0.1, max = 0.8 }
memory-gb = 1.5
[block]
memory-gb = 0.375
[planner]
gamma-max = 2.5
"""


def options(folder, **more):
    (folder / "three.toml").write_text(SCENARIO)
    more = {"num-rounds": 4, "local-steps": 2, "scenario": folder / "three.toml", "evaluate-every": 2, **more}
    # Momenta, the server's too, a schedule, dropout and residuals: whatever is forgotten shows in the weights.
    learning = {"optimizer.name": "adamw", "model.dropout": 0.1, "optimizer.clip-norm": 1.0, "gradient-accumulation": 2}
    server = {"server-optimizer.name": "fedavgm", "server-optimizer.lr": 1.0, "server-optimizer.momentum": 0.5}
    return sets(**learning, **server, **{"selection.load-best-at-end": "true", **more})


def kill_in_round(run, folder, committed):
    """Kill the process of the server app with SIGKILL, soon after a round was committed."""
    checkpoint = folder / "runs" / "latest" / "checkpoint" / f"round-{committed:06d}"

    def is_committed():
        assert run.poll() is None, run.stderr.read()[-2000:]
        return checkpoint.exists()

    eventually(is_committed, 400)
    time.sleep(0.15)
    servers = [
        p for p in psutil.Process(run.pid).children(recursive=True) if "flwr-simulation" in " ".join(p.cmdline())
    ]
    assert servers
    for server in servers:
        server.send_signal(signal.SIGKILL)


ALONE = ClusterPlan(delta=(5,), order=(0,), m=2)
COMPRESSED = {"compression.update": "top-k", "compression.density": 0.2, "compression.activations": "int8"}


@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.timeout(1800)
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    collapipe_here("run", *options(straight, **COMPRESSED), cwd=straight)

    command = [sys.executable, "-m", "flower_app.cli", "run", *map(str, options(killed, **COMPRESSED))]
    run = subprocess.Popen(command, cwd=killed, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        kill_in_round(run, killed, committed=2)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 1, said
    assert "the simulation ended without a result" in said
    assert re.search(r"^continue after round \d: collapipe run --resume \d{8}-\d{6}-default$", said, re.MULTILINE)
    before = rounds(killed / "runs" / "latest")
    assert 2 <= len(before) < 4

    resumed = collapipe("run", "--resume", "latest", cwd=killed)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    ours, theirs = ((folder / "runs" / "latest") for folder in (killed, straight))
    weights, expected = (load_file(run_dir / "model" / "model.safetensors") for run_dir in (ours, theirs))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    for key in ("round", "train_loss", "metrics", "lr", "virtual", "plan"):
        assert [line[key] for line in rounds(ours)] == [line[key] for line in rounds(theirs)], key
    assert all(line["bytes_up"] < line["bytes_down"] for line in rounds(ours))
    chosen = [[c["selected"] for c in line["virtual"]["clusters"]] for line in rounds(theirs)]
    assert all(sum(row) == 2 for row in chosen) and len({tuple(row) for row in chosen}) > 1
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (ours, theirs)]
    assert summaries[0]["metrics"] == summaries[1]["metrics"] and summaries[0]["rounds"] == 4


@pytest.mark.slow
def test_clusters_with_a_model_each_go_on_with_their_own_models(tmp_path):
    # Names with a space and an umlaut are as good as others.
    straight, stopped = tmp_path / "my größe", tmp_path / "stopped größe"
    straight.mkdir()
    settings = {"num-rounds": 2, "num-clusters": 2, "scenario": "two-clusters", "optimizer.name": "adamw"}
    collapipe_here("run", *sets(strategy="pipeline", **settings), cwd=straight)

    shutil.copytree(straight, stopped, symlinks=True)
    ours, theirs = ((folder / "runs" / "latest").resolve() for folder in (stopped, straight))
    # As if it had been stopped before its second round was committed.
    shutil.rmtree(ours / "checkpoint" / "round-000002")
    (ours / "summary.json").unlink()
    collapipe_here("run", "--resume", ours, cwd=stopped)
    weights, expected = (
        load_file(run / "checkpoint" / "round-000002" / "weights.safetensors") for run in (ours, theirs)
    )
    assert weights.keys() == expected.keys()
    assert {name.split("/")[0] for name in weights} == {"cluster-0", "cluster-1"}
    assert all(weights[name].equal(expected[name]) for name in expected)
    assert [line["train_loss"] for line in rounds(ours)] == [line["train_loss"] for line in rounds(theirs)]

    again = collapipe("run", "--resume", "latest", cwd=stopped)
    assert again.returncode == 2 and "has finished its 2 rounds" in again.stderr
    assert "extend it with --set num-rounds=4" in again.stderr
    collapipe_here("run", "--resume", "latest", "--set", "num-rounds=3", cwd=stopped)
    assert [line["round"] for line in rounds(ours)] == [1, 2, 3]
    assert json.loads((ours / "summary.json").read_text())["rounds"] == 3
    assert "num-rounds = 3" in (ours / "config.toml").read_text()


def test_a_control_unit_of_a_reused_name_neither_reads_nor_loses_to_the_older_runs_files(local_ray, tmp_path):
    """Its folder held rounds 50 and 51 of an older run: the newer run's files were dropped as the oldest ones,
    and the older run's optimizer could be restored."""
    spec = tiny_spec("bert", "masked-lm")
    batch, weights = tiny_batch(spec, size=7, length=9, seed=1), build_parts(spec, seed=1).weights()

    def after(name, rounds, folder, begun, resumed=0, **setup):
        options = {"spec": spec, "checkpoints": folder, "resume_round": resumed, **setup}
        (unit,) = control_units([batch], OptimizerConfig(lr=0.01), f"reused-{name}", **options)
        try:
            for number in rounds:
                begun = unit.train_round(RoundOrder(round=number, weights=begun, plan=ALONE)).weights
        finally:
            unit.close()
        return begun, unit.restored

    after("older", (50, 51), tmp_path, weights)
    first, restored = after("newer", (1,), tmp_path, weights)
    assert not restored
    second, restored = after("resumed", (2,), tmp_path, first, resumed=1)
    assert restored
    expected, _ = after("straight", (1, 2), None, weights)
    assert all(second[name].equal(value) for name, value in expected.items())
    # A server that goes on with another run: its round 2 is not the one that is here.
    _, restored = after("other", (3,), tmp_path, first, resumed=2, identity=RunIdentity("another", ""))
    assert not restored and [path.stem for path in tmp_path.glob("round-*")] == ["round-000003"]
