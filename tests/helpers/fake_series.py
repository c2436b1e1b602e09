"""Runs of a series that write their files and train nothing."""

import json
from pathlib import Path

from flower_app.launch.launcher import Outcome
from flower_app.launch.session_app import RUNS
from flower_app.runs.run_directory import FAILED, FINISHED, append_round, read_run_config, write_summary


def fake_round(number, scale):
    """A line of rounds.jsonl with one selected cluster of two."""
    chosen = {
        "cluster": 0,
        "selected": True,
        "gamma": 2.0,
        "pipeline_s": 10.0 * scale,
        "pipeline_fused_s": 9.0 * scale,
        "pipeline_eq15_s": 11.0 * scale,
        "link_bytes": [5.0, 0.0],
        "device_memory_bytes": [7.0 * scale, 3.0],
    }
    rests = {"cluster": 1, "selected": False, "gamma": 3.0}
    virtual = {"latency_s": 20.0 * scale, "latency_eq15_s": 22.0, "energy_j": 4.0, "gamma_max": 3.4}
    return {
        "round": number,
        "train_loss": 1.0,
        "bytes_up": 100,
        "bytes_down": 50,
        "metrics": {"loss": 1.0, "bleu": 10.0 * number} if number % 2 == 0 else {},
        "clusters": [{"cluster": 0, "devices": {"0": {"peak_bytes": 30, "idle_bytes": 10}}}],
        "virtual": virtual | {"clusters": [chosen, rests]},
    }


def fake_run(run_dir, config, resume):
    """Write the files of a run whose first round of four takes a hundred times as long."""
    for number in range(1, 5):
        append_round(run_dir, fake_round(number, (100 if number == 1 else 1) * (1 + config.seed)))
    write_summary(run_dir, FINISHED, rounds=4, wall_s=1.0, metrics={"loss": 1.0, "bleu": 40.0 + config.seed})


class FakeLauncher:
    """Trains the runs of a session by a function, up to the first that fails."""

    def __init__(self, train=fake_run):
        self.train = train

    def launch(self, order):
        for entry in json.loads((order.run_dir / RUNS).read_text()):
            run_dir = Path(entry["run-dir"])
            try:
                self.train(run_dir, read_run_config(run_dir), entry["resume"])
            except RuntimeError as error:
                write_summary(run_dir, FAILED, error=str(error))
                return Outcome(FAILED, f"{run_dir.name}: {error}")
        return Outcome(FINISHED)
