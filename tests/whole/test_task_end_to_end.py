"""Pre-training on the clusters' text, a classifier that starts from it, its use and export, through every real part."""

import json

import pytest
import torch

from helpers.command_line import collapipe_here, rounds, sets

MORE = {"model.family": "bert", "scenario": "two-clusters"}


# Two runs and more, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: a masked language model, whose output layer is the embedding's matrix, and a classifier after it."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, more in (
        # Nothing is better by 100, so that patience ends with the second round of three.
        (
            "masked-lm",
            {"optimizer.clip-norm": 1.0, "evaluate-every": 1, "selection.patience": 1, "selection.min-delta": 100},
        ),
        ("sequence-classification", {"model.from": "latest"}),
    ):
        collapipe_here("run", *sets(**{**MORE, "name": name, "task.name": name, **more}), cwd=folder)
    return folder


def run_of(folder, name):
    (run,) = (folder / "runs").glob(f"*-{name}")
    return run


def test_both_tasks_are_trained_and_scored(runs):
    for name, metrics in (("masked-lm", {"perplexity"}), ("sequence-classification", {"accuracy", "macro_f1"})):
        run = run_of(runs, name)
        lines, summary = rounds(run), json.loads((run / "summary.json").read_text())
        assert lines[-1]["train_loss"] < lines[0]["train_loss"]
        assert metrics <= summary["metrics"].keys()
        collapipe_here("evaluate", run, cwd=runs)


def test_patience_ends_a_run_before_its_last_round(runs):
    for name, trained in (("masked-lm", 2), ("sequence-classification", 3)):
        run = run_of(runs, name)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["rounds"] == len(rounds(run)) == trained
    assert json.loads((run_of(runs, "masked-lm") / "summary.json").read_text())["best_round"] == 1


def test_the_tied_matrix_goes_over_the_stream_and_is_saved_once(runs):
    from safetensors.torch import load_file

    weights = load_file(run_of(runs, "masked-lm") / "model" / "model.safetensors")
    assert "embedding.embeddings.word_embeddings.weight" in weights
    assert "head.predictions.decoder.weight" not in weights


def test_the_classifier_began_where_the_language_model_ended(runs):
    from flower_app.runs.run_directory import read_run_config
    from flower_app.saved_model import load_model
    from flower_app.tasks.base import task

    start, config = run_of(runs, "masked-lm"), read_run_config(run_of(runs, "sequence-classification"))
    assert config.model.from_ == str(start)
    begun = task(config.task).prepare(config.data, config.model, config.seed, 2).build(config.seed).weights()
    for name, value in load_model(start).parts.weights(head=False).items():
        assert torch.equal(begun[name], value), name


def test_the_models_are_used_and_exported(runs):
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

    assert collapipe_here("predict", run_of(runs, "masked-lm"), "the [MASK] sleeps", cwd=runs).startswith("the ")
    text = "the old dog sleeps"
    label = collapipe_here("predict", "latest", text, cwd=runs).strip()
    for run, loader in (
        (run_of(runs, "masked-lm"), AutoModelForMaskedLM),
        ("latest", AutoModelForSequenceClassification),
    ):
        collapipe_here("export", run, runs / loader.__name__, cwd=runs)
        model = loader.from_pretrained(runs / loader.__name__).eval()
    tokenizer = AutoTokenizer.from_pretrained(runs / loader.__name__)
    with torch.no_grad():
        best = int(model(**tokenizer(text, return_tensors="pt")).logits.argmax())
    assert model.config.id2label[best] == label
