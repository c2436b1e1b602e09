"""What the server does with its evaluations: the model that is kept, the end of training, and both after a restart."""

import json
import os
from functools import partial
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import append_round, claim_run_directory
from flower_app.training import training_run
from flower_app.training.cluster_setup import Clusters
from flower_app.training.global_models import GlobalModels
from flower_app.training.prepared_run import prepare
from flower_app.training.round_closer import RoundCloser
from flower_app.training.training_run import train_prepared
from strategies.grid.update_receipts import UpdateReceipts
from strategies.records import to_arrays

FLAT = {
    "num-rounds": 9,
    "evaluate-every": 1,
    "num-clusters": 2,
    "strategy": "FedAvg",
    "data.num-examples": 40,
    "data.evaluation-examples": 4,
    "data.vocab-size": 300,
    "model.width": 16,
    "model.num-heads": 2,
    "model.feed-forward": 32,
    "model.encoder-layers": 2,
    "model.decoder-layers": 1,
    "task.max-new-tokens": 2,
}
LOSSES = [5.0, 3.0, 4.0, 2.0, 2.5, 6.0, 1.0, 0.5, 0.25]
"""What the evaluations find; with patience 2 the best is round 4, and round 6 the last."""


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


class ScriptedGrid:
    """Exchanges of rounds in which no cluster has trained."""

    def __init__(self):
        self.receipts, self.last_reports = UpdateReceipts([]), []

    def take_round(self):
        return {"clusters": [], "failed": [], "faults": []}


def scripted(run_dir, monkeypatch, killed_after=0, set_up=lambda: None, **more):
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
        patch("make_strategy", lambda *_, **__: Scripted(run.completed, killed_after))
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


def test_without_selection_all_rounds_are_trained_and_the_last_model_is_kept(tmp_path, monkeypatch):
    run_dir = claim_run_directory(tmp_path / "run")
    run = scripted(run_dir, monkeypatch, **{"num-rounds": 6})
    number, summary = kept(run_dir)
    assert number == 6 and (summary["rounds"], summary["best_round"]) == (6, 4)
    assert run.scored_rounds[-1] == ("test", 6.0)


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


def test_a_run_that_was_killed_when_patience_had_ended_is_only_closed(tmp_path, monkeypatch):
    run_dir = claim_run_directory(tmp_path / "run")
    monkeypatch.setattr(training_run, "finish", lambda *_: None)
    scripted(run_dir, monkeypatch, **SELECT)
    monkeypatch.undo()
    run = scripted(run_dir, monkeypatch, resume=True, **SELECT)
    assert run.scored_rounds == [("test", 4.0)]
    assert kept(run_dir)[0] == 4


def lines_of(run_dir):
    return [json.loads(line)["round"] for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cut", [1, 0.6, 0.3])
def test_rounds_that_a_crash_has_shortened_are_trained_again_not_passed_over(tmp_path, monkeypatch, caplog, cut):
    """The lines of a short file were lost without a word, and the next one could be torn."""
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, 4, **SELECT)
    path = run_dir / "rounds.jsonl"
    size = path.stat().st_size
    os.truncate(path, size - 1 if cut == 1 else int(cut * size))
    try:
        scripted(run_dir, monkeypatch, resume=True, **SELECT)
        assert lines_of(run_dir) == [1, 2, 3, 4, 5, 6] and kept(run_dir)[0] == 4
        assert "rounds.jsonl: expected at least" in caplog.text and "goes on from round" in caplog.text
    except ValueError as refusal:
        # Only the last three rounds are kept.
        assert cut == 0.3 and "no checkpoint is whole" in str(refusal)


def test_a_new_run_does_not_go_into_the_directory_of_one_that_was_killed(tmp_path, monkeypatch):
    """It had no summary yet, and the lines of the two were mixed."""
    run_dir = claim_run_directory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, 2)
    message = ""
    try:
        scripted(run_dir, monkeypatch)
    except ValueError as refusal:
        message = str(refusal)
    assert "holds a run already (rounds.jsonl); go on with it (collapipe run --resume), or name another" in message
    assert lines_of(run_dir) == [1, 2]


def test_a_model_of_a_lost_round_goes_with_it(tmp_path, monkeypatch):
    """Saved, but not committed: a continued run that trains the round otherwise must not keep it."""
    run_dir = claim_run_directory(tmp_path / "run")
    monkeypatch.setattr("flower_app.runs.run_directory.append_round", _killed_in_round_4)
    with pytest.raises(KeyboardInterrupt):
        scripted(run_dir, monkeypatch, **SELECT)
    monkeypatch.undo()
    seen = []
    scripted(run_dir, monkeypatch, resume=True, set_up=lambda: seen.append(model_round(run_dir)), **SELECT)
    assert seen == [2.0] and kept(run_dir)[0] == 4


def _killed_in_round_4(run_dir, record):
    if record["round"] == 4:
        raise KeyboardInterrupt
    append_round(run_dir, record)


def model_round(run_dir):
    return float(next(iter(load_file(run_dir / "model" / "model.safetensors").values())).flatten()[0])


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
    message = ""
    try:
        scripted(run_dir, monkeypatch, resume=True, **flat)
    except ValueError as refusal:
        message = str(refusal)
    assert f"resume: {key}: the file is not the one that the run began with (expected SHA-256 " in message
    assert "put it back as it was, or start a new run" in message
