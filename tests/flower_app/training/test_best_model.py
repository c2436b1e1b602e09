"""Evaluations of the server: the model that is kept, the end of training, and both after a restart."""

import contextlib
import json
import os
from functools import partial
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import claim_run_directory
from flower_app.training import training_run
from flower_app.training.cluster_setup import Clusters
from flower_app.training.global_models import GlobalModels
from flower_app.training.prepared_run import prepare
from flower_app.training.round_closer import RoundCloser
from flower_app.training.training_run import train_prepared
from helpers.saved_runs import TWO_CLUSTERS
from strategies.grid.update_receipts import UpdateReceipts
from strategies.records import to_arrays

FLAT = TWO_CLUSTERS | {
    "num-rounds": 9,
    "evaluate-every": 1,
    "strategy": "FedAvg",
    "task.max-new-tokens": 2,
}
LOSSES = [5.0, 3.0, 4.0, 2.0, 2.5, 6.0, 1.0, 0.5, 0.25]
"""Scores of the evaluations; with patience 2 the best is round 4, and round 6 the last."""


class ScriptedModels(GlobalModels):
    """Scores them by their round."""

    def score(self, split):
        self.scored_rounds.append((split, float(next(iter(self._models[0].values())).flatten()[0])))
        round_ = int(self.scored_rounds[-1][1])
        return {"loss": LOSSES[round_ - 1], "bleu": 0.0}, ""


class Scripted:
    """A strategy whose rounds are scripted: the weights of round r are all r."""

    def __init__(self, completed, killed_after):
        self.completed, self.killed_after = completed, killed_after

    def start(self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_fn):
        for number in range(1, num_rounds + 1):
            value = number + self.completed
            arrays = {name: torch.full(a.shape, float(value)) for name, a in initial_arrays.items()}
            evaluate_fn(number, to_arrays(arrays))
            if value == self.killed_after:
                raise KeyboardInterrupt


class Discarding:
    """A strategy that goes on with the weights of the round before in some rounds, as Flower's do without arrays."""

    def __init__(self, discarded):
        self.discarded = discarded

    def start(self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_fn):
        arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            if number not in self.discarded:
                arrays = arrays.copy()
                for name in arrays:
                    arrays[name] = type(arrays[name])(arrays[name].numpy() + 1)
            evaluate_fn(number, arrays)


class ScriptedGrid:
    """Exchanges of rounds in which no cluster has trained."""

    def __init__(self):
        self.receipts, self.last_reports = UpdateReceipts([]), []

    def take_round(self):
        return {"clusters": [], "failed": [], "faults": []}


def scripted(run_dir, monkeypatch, killed_after=0, set_up=lambda: None, strategy=None, **more):
    """Train a run whose rounds are scripted; evaluations find :data:`LOSSES`."""
    patch = partial(monkeypatch.setattr, training_run)
    # A node serves one run at a time, in all processes of the machine.
    patch("wait_for_nodes", lambda *_: [2 * os.getpid(), 2 * os.getpid() + 1])
    patch("set_up", lambda *_: set_up() or Clusters([], 0, 2))
    patch("run_grid", lambda *_: ScriptedGrid())
    patch("ResumedStrategy", lambda strategy, _: strategy)
    monkeypatch.setattr(RoundCloser, "_planned_and_spent", lambda self, server_round: {})
    scored_rounds = []
    patch("GlobalModels", type("Models", (ScriptedModels,), {"scored_rounds": scored_rounds}))
    threads = torch.get_num_threads()
    try:
        run = prepare(RunConfig.from_flat({**FLAT, "run-dir": str(run_dir), **more}), run_dir)
        patch("make_strategy", lambda *_, **__: strategy or Scripted(run.completed, killed_after))
        train_prepared(run, grid=None)
    finally:
        torch.set_num_threads(threads)
    return SimpleNamespace(scored_rounds=scored_rounds)


def kept(run_dir):
    """Round of the model in the run's folder, and the summary."""
    weights = load_file(run_dir / "model" / "model.safetensors")
    summary = json.loads((run_dir / "summary.json").read_text())
    return float(next(iter(weights.values())).flatten()[0]), summary


SELECT = {"selection.load-best-at-end": True, "selection.patience": 2}


def test_patience_ends_training_and_the_best_model_is_kept_and_scored(tmp_path, monkeypatch):
    run_dir = claim_run_directory(tmp_path / "run")
    run = scripted(run_dir, monkeypatch, **SELECT)
    number, summary = kept(run_dir)
    assert number == 4 and (summary["rounds"], summary["best_round"]) == (6, 4)
    assert run.scored_rounds[-1] == ("test", 4.0) and summary["metrics"]["loss"] == 2.0
    assert len((run_dir / "rounds.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("killed_after", [1, 4, 5])
def test_a_continued_run_remembers_the_best_and_how_much_patience_is_left(tmp_path, monkeypatch, killed_after):
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, killed_after, **SELECT)
    run = scripted(run_dir, monkeypatch, resume=True, **SELECT)
    number, summary = kept(run_dir)
    assert number == 4 and (summary["rounds"], summary["best_round"]) == (6, 4)
    assert run.scored_rounds[0] == ("validation", killed_after + 1.0) and run.scored_rounds[-1] == ("test", 4.0)
    assert len((run_dir / "rounds.jsonl").read_text().splitlines()) == 6


def lines_of(run_dir):
    return [json.loads(line)["round"] for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


def test_a_new_run_does_not_go_into_the_directory_of_one_that_was_killed(tmp_path, monkeypatch):
    """The killed run had no summary yet, and the lines of the two were mixed."""
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, 2)
    with pytest.raises(ValueError, match=r"holds a run already \(rounds.jsonl\); go on with it .*, or name another"):
        scripted(run_dir, monkeypatch)
    assert lines_of(run_dir) == [1, 2]


SCENARIO = resources.files("configs").joinpath("scenarios", "default.toml")


@pytest.mark.parametrize("key", ["scenario", "plan", "data.train-source", "data.test-target"])
def test_a_run_does_not_go_on_with_another_file(tmp_path, monkeypatch, key):
    files = {"scenario": "network.toml", "plan": "plan.json"}
    (tmp_path / "network.toml").write_text(SCENARIO.read_text())
    (tmp_path / "plan.json").write_text("{}")
    for split, count in (("train", 40), ("test", 4)):
        for side in ("source", "target"):
            name = files[f"data.{split}-{side}"] = f"{split}.{side}"
            (tmp_path / name).write_text("".join(f"sentence number {i} of the {side}\n" for i in range(count)))
    flat = {name: str(tmp_path / file) if "." not in name else file for name, file in files.items()}
    flat |= {"data.source": "files", "data.path": str(tmp_path), "num-rounds": 4}
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, 2, **flat)
    with (tmp_path / files[key]).open("a") as file:
        file.write("# \n" if key == "scenario" else "one more\n")
    message = (
        rf"resume: {key}: the file is not the one that the run began with \(expected SHA-256 .*put it back as it was"
    )
    with pytest.raises(ValueError, match=message):
        scripted(run_dir, monkeypatch, resume=True, **flat)


def test_a_run_without_any_weights_has_failed(tmp_path, monkeypatch):
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(RuntimeError, match="none of the 2 rounds has changed the model: strategy FedAvg"):
        scripted(run_dir, monkeypatch, strategy=Discarding({1, 2}), **{"num-rounds": 2})
    assert not (run_dir / "summary.json").exists()


@pytest.mark.parametrize(("killed_after", "kinds"), [(0, []), (2, ["server"])], ids=["extended", "killed"])
def test_only_a_run_that_had_not_ended_goes_on_after_a_fault(tmp_path, monkeypatch, killed_after, kinds):
    run_dir = claim_run_directory(tmp_path / "run")
    with contextlib.suppress(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, killed_after, **{"num-rounds": 3})
    scripted(run_dir, monkeypatch, resume=True, **{"num-rounds": 3 if killed_after else 5})
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert [fault["kind"] for line in lines for fault in line["faults"]] == kinds
    assert len(lines) == (3 if killed_after else 5)
