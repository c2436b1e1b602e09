"""A run whose server is killed in the middle of a round goes on as if nothing had happened, bit for bit."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file
from test_end_to_end import collapipe, rounds, sets

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 3
devices = 3
channels = 2
seed = 5
[device]
flop-per-cycle = { min = 10.0, max = 24.0 }
frequency-ghz = { min = 0.1, max = 0.8 }
memory-gb = 0.75
[block]
memory-gb = 0.375
[planner]
gamma-max = 2.5
"""


def options(folder, **more):
    (folder / "three.toml").write_text(SCENARIO)
    more = {"num-rounds": 5, "local-steps": 2, "scenario": folder / "three.toml", "evaluate-every": 2, **more}
    # Momenta, the server's too, a schedule and dropout: whatever is forgotten shows in the weights.
    learning = {"optimizer.name": "adamw", "model.dropout": 0.1, "optimizer.clip-norm": 1.0, "gradient-accumulation": 2}
    server = {"server-optimizer.name": "fedavgm", "server-optimizer.lr": 1.0, "server-optimizer.momentum": 0.5}
    return sets(**learning, **server, **{"selection.load-best-at-end": "true", **more})


def kill_in_round(run, folder, committed):
    """Kill the process of the server app with SIGKILL, soon after a round was committed."""
    checkpoint = folder / "runs" / "latest" / "checkpoint" / f"round-{committed:06d}"
    deadline = time.monotonic() + 200
    while not checkpoint.exists():
        assert run.poll() is None, run.stderr.read()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.15)
    servers = [
        p for p in psutil.Process(run.pid).children(recursive=True) if "flwr-simulation" in " ".join(p.cmdline())
    ]
    assert servers
    for server in servers:
        server.send_signal(signal.SIGKILL)


COMPRESSED = {
    "model.trainable": "lora",
    "lora.rank": 4,
    "lora.dropout": 0.1,
    "compression.update": "top-k",
    "compression.density": 0.2,
    "compression.activations": "int8",
    "costs": "model",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [{}, COMPRESSED], ids=["full", "adapters-compressed"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, more):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    result = collapipe("run", *options(straight, **more), cwd=straight)
    assert result.returncode == 0, result.stderr[-3000:]

    command = [sys.executable, "-m", "flower_app.cli", "run", *map(str, options(killed, **more))]
    run = subprocess.Popen(command, cwd=killed, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        kill_in_round(run, killed, committed=2)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 1, said
    assert "the simulation ended without a result" in said
    before = rounds(killed / "runs" / "latest")
    assert 2 <= len(before) < 5

    resumed = collapipe("run", "--resume", "latest", cwd=killed)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    ours, theirs = ((folder / "runs" / "latest") for folder in (killed, straight))
    weights, expected = (load_file(run_dir / "model" / "model.safetensors") for run_dir in (ours, theirs))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    for key in ("round", "train_loss", "metrics", "lr", "virtual", "plan"):
        assert [line[key] for line in rounds(ours)] == [line[key] for line in rounds(theirs)], key
    # Frozen weights go down with the set-up of each of the two processes, to all three nodes, and with no round.
    frozen = sum(v.nbytes for n, v in weights.items() if not n.startswith("head.") and ".lora_" not in n)
    told = [line["setup_bytes"] for line in rounds(ours)]
    assert told[0] >= 3 * frozen if more else not any(told)
    assert sum(size > 0 for size in told) == (2 if more else 0)
    if more:
        assert all(line["bytes_up"] < line["bytes_down"] < frozen for line in rounds(ours))
    chosen = [[c["selected"] for c in line["virtual"]["clusters"]] for line in rounds(theirs)]
    assert all(sum(row) == 2 for row in chosen) and len({tuple(row) for row in chosen}) > 1
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (ours, theirs)]
    assert summaries[0]["metrics"] == summaries[1]["metrics"] and summaries[0]["rounds"] == 5

    again = collapipe("run", "--resume", "latest", cwd=killed)
    assert again.returncode == 2 and "has finished its 5 rounds" in again.stderr
