"""``from flower_app import train``: the road of ``collapipe run``, and what comes back."""

from pathlib import Path

import pytest

import flower_app
from flower_app import Run, TrainingFailed, train
from flower_app.launch.launcher import Outcome
from helpers.saved_runs import SMALL, SUMMARY, UntrainedLauncher, saved_run

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    assert "train" in dir(flower_app)
    with pytest.raises(AttributeError, match="module 'flower_app' has no attribute 'fit'"):
        _ = flower_app.fit


@pytest.mark.parametrize("form", ["flat", "tables", "file", "file and keys"])
def test_keys_come_from_a_file_from_a_dictionary_or_from_both(form):
    tables = {"scenario": "two-clusters", "num-rounds": 2, "data": {"num-examples": 60}, "optimizer": {"lr": 0.25}}
    flat = {"scenario": "two-clusters", "num-rounds": 2, "data.num-examples": 60, "optimizer.lr": 0.25}
    text = 'scenario = "two-clusters"\nnum-rounds = 2\n[data]\nnum-examples = 60\n[optimizer]\nlr = 0.25\n'
    Path("mine.toml").write_text(text)
    Path("other.toml").write_text(text.replace("0.25", "0.5"))
    arguments = {"flat": (flat,), "tables": (tables,), "file": (Path("mine.toml"),)}
    chosen = arguments.get(form, ("other.toml", {"learning-rate": 0.25}))
    run = train(*chosen, on_round=lambda line: None, launcher=UntrainedLauncher())
    config = run.config
    assert (config.scenario, config.num_rounds, config.data.num_examples) == ("two-clusters", 2, 60)
    assert config.optimizer.lr == 0.25 and config.num_clusters == 2


def test_a_run_gives_metrics_predictions_scores_report_and_export():
    lines, said = [], []
    run = train(SMALL, on_round=lines.append, say=said.append, launcher=UntrainedLauncher())
    assert run.directory == Path("runs/latest").resolve() and run.status == "finished"
    assert run.metrics == {"bleu": 12.5} and "bleu" in repr(run)
    assert [line["round"] for line in lines] == [line["round"] for line in run.rounds] == [1, 2]
    assert f"run: {run.directory}" in said
    one, several = run.predict("a dog"), run.predict(["a dog", "a cat"])
    assert isinstance(one, str) and len(several) == 2 and several[0] == one
    score = run.evaluate("validation", {"data.max-length": 2})
    assert score.examples == 4 and score.truncated == 8 and "bleu" in score.metrics
    with pytest.raises(ValueError, match="split: expected test or validation, found 'train'"):
        run.evaluate("train")
    assert run.report() == run.directory / "report.html" and run.report("other.html").is_file()
    with pytest.raises(ValueError, match="the model is of family transformer"):
        run.export("folder")


def test_a_model_of_the_library_is_exported():
    keys = {**SMALL, "model.family": "bert", "task.name": "sequence-classification"}
    run = Run(saved_run(keys))
    assert run.status == "" and run.metrics == {}
    folder = run.export("exported")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_mistake_is_an_error_before_anything_is_written():
    for keys, message in (
        ({"optimizer.lrr": 1}, "unknown configuration key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ({"num-rounds": "many"}, "num-rounds: expected a whole number, found a text: 'many'"),
        ({"data": {"path": 3}}, "data.path: expected a text, found a whole number: 3"),
    ):
        with pytest.raises(ValueError) as error:
            train(keys, launcher=UntrainedLauncher())
        assert str(error.value) == message
    with pytest.raises(ValueError, match="resume: a run goes on with its own configuration"):
        train(SMALL, resume="latest", launcher=UntrainedLauncher())
    assert not Path("runs").exists()


def test_a_training_that_fails_says_how_and_leaves_its_run():
    with pytest.raises(TrainingFailed, match="failed: it went wrong; logs: ") as error:
        train(SMALL, on_round=lambda line: None, launcher=UntrainedLauncher(Outcome("failed", "it went wrong")))
    assert error.value.run.status == "failed" and len(error.value.run.rounds) == 2
    with pytest.raises(ValueError, match="^node 3: no such file$"):
        train(
            SMALL, on_round=lambda line: None, launcher=UntrainedLauncher(Outcome("bad-input", "node 3: no such file"))
        )


@pytest.mark.parametrize(("best", "hints"), [(1, 1), (2, 0)])
def test_the_end_of_a_run_says_how_its_best_model_is_kept(best, hints):
    lines, summary = [], {**SUMMARY, "best_round": best, "scored_round": 2}
    train(
        SMALL, on_round=lambda _: None, say=lines.append, launcher=UntrainedLauncher(Outcome("finished", "", summary))
    )
    hint = "best loss on the validation data: round 1, and the model is that of round 2; "
    assert [line.removeprefix(hint) for line in lines if "best" in line] == [
        "selection.load-best-at-end = true keeps the best one"
    ] * hints
