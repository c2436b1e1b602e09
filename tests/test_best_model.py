"""What the server does with its evaluations: the model that is kept, the end of training, and both after a restart."""

import json

import pytest
import torch
from safetensors.torch import load_file

from flower_app.config import RunConfig
from flower_app.global_models import GlobalModels
from flower_app.run_directory import claim_run_directory
from flower_app.training_run import TrainingRun
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


class ScriptedRun(TrainingRun):
    """A run whose rounds are scripted: the weights of round r are all r, and evaluations find :data:`LOSSES`."""

    def _set_up(self, nodes):
        return []

    def _account(self, server_round):
        return {}

    def _write_timeline(self, server_round, record):
        pass

    def _strategy(self, planner, clusters):
        run = self

        class Scripted:
            def start(self, grid, initial_arrays, num_rounds, timeout, evaluate_fn):
                for number in range(1, num_rounds + 1):
                    value = number + run.completed
                    run.grid.take_round = lambda: {"clusters": [], "failed": [], "faults": []}
                    arrays = {name: torch.full(a.shape, float(value)) for name, a in initial_arrays.items()}
                    evaluate_fn(number, to_arrays(arrays))
                    if value == run.killed_after:
                        raise KeyboardInterrupt

        return Scripted()


def scripted(run_dir, monkeypatch, killed_after=0, **more):
    monkeypatch.setattr("flower_app.training_run.wait_for_nodes", lambda *_: [1, 2])
    monkeypatch.setattr("flower_app.training_run.write_pictures", lambda _: None)
    monkeypatch.setattr("flower_app.training_run.Continued", lambda strategy, _: strategy)
    scored_rounds = []
    models = type("Models", (ScriptedModels,), {"scored_rounds": scored_rounds})
    monkeypatch.setattr("flower_app.training_run.GlobalModels", models)
    threads = torch.get_num_threads()
    run = ScriptedRun(RunConfig.from_flat({**FLAT, "run-dir": str(run_dir), **more}), run_dir, grid=None)
    run.scored_rounds, run.killed_after = scored_rounds, killed_after
    try:
        run.run()
    finally:
        torch.set_num_threads(threads)
    return run


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
    monkeypatch.setattr(ScriptedRun, "_finish", lambda self: None)
    scripted(run_dir, monkeypatch, **SELECT)
    monkeypatch.undo()
    run = scripted(run_dir, monkeypatch, resume=True, **SELECT)
    assert run.scored_rounds == [("test", 4.0)]
    assert kept(run_dir)[0] == 4
