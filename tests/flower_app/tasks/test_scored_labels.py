"""Scores of an evaluation for each label, and their record in a run."""

import json
import math
from collections import Counter

import pytest
import torch
from seqeval.metrics import classification_report
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import claim_run_directory, reopen
from flower_app.tasks.data.corpus import DataConfig
from flower_app.training.global_models import GlobalModels
from flower_app.training.prepared_run import prepare as prepare_run
from flower_app.training.round_closer import RoundClock, RunStanding
from flower_app.training.training_run import finish
from helpers.task_cases import prepare
from strategies.records import to_arrays

TEXTS, WORDS = "sequence-classification", "token-classification"


def evaluated(task, num_examples=40, **changes):
    """Score an untrained model; returns the score and the model."""
    data = DataConfig(num_examples=100, evaluation_examples=num_examples, vocab_size=300, max_length=32, **changes)
    prepared = prepare(task, data)
    parts = prepared.build(seed=3)
    with torch.no_grad():
        # Otherwise all texts look alike to it.
        for parameter in parts.head.parameters():
            parameter.mul_(40)
    score = prepared.evaluator.evaluate(parts, "test")
    assert score.examples == num_examples and "mistakes" in vars(score)
    return score, parts


def test_classes_of_texts_are_scored_as_sklearn_does():
    score, _ = evaluated(TEXTS)
    names = sorted({*score.references, *score.predictions})
    assert len(names) > 2
    expected = zip(
        names,
        *precision_recall_fscore_support(score.references, score.predictions, labels=names, zero_division=0),
        strict=True,
    )
    found = {each["name"]: each for each in score.mistakes["classes"]}
    assert score.mistakes["num_classes"] == len(found) == len(names)
    for name, precision, recall, f1, support in expected:
        values = {"name": name, "precision": precision, "recall": recall, "f1": f1, "support": support}
        assert found[name] == {key: pytest.approx(value) if key != "name" else value for key, value in values.items()}
    matrix = confusion_matrix(score.references, score.predictions, labels=names)
    counts = {(e, f): count for e, f, count in score.mistakes["confusions"]}
    assert score.mistakes["whole"] and sum(counts.values()) == 40
    assert all(counts.get((e, f), 0) == matrix[i, j] for i, e in enumerate(names) for j, f in enumerate(names))


def test_the_worst_texts_are_wrong_and_of_the_greatest_loss():
    score, _ = evaluated(TEXTS, 60)
    wrong = [i for i, (r, p) in enumerate(zip(score.references, score.predictions, strict=True)) if r != p]
    worst = score.mistakes["worst"]
    assert score.mistakes["wrong"] == len(wrong) > 20 == len(worst)
    losses = [each["loss"] for each in worst]
    assert losses == sorted(losses, reverse=True) and max(losses) > score.metrics["loss"]
    triples = Counter((score.sources[i], score.references[i], score.predictions[i]) for i in wrong)
    assert Counter((e["text"], e["expected"], e["found"]) for e in worst) <= triples
    # The found label is the likelier one: its probability is over that of the expected label, exp(-loss).
    assert all(math.exp(-each["loss"]) < each["confidence"] <= 1 for each in worst)


def test_types_of_spans_are_scored_as_seqeval_does():
    score, _ = evaluated(WORDS)
    references, predictions = ([line.split(" ") for line in lines] for lines in (score.references, score.predictions))
    expected = classification_report(references, predictions, output_dict=True, zero_division=0)
    found = {each["name"]: each for each in score.mistakes["classes"]}
    assert score.mistakes["scored"] == "spans" and len(found) > 2
    for name, each in found.items():
        values = expected[name]
        assert [each[key] for key in ("precision", "recall", "f1", "support")] == pytest.approx(
            [values[key] for key in ("precision", "recall", "f1-score", "support")]
        )
    types = [Counter(tag[2:] or "O" for tags in lines for tag in tags) for lines in (references, predictions)]
    for place, counts in enumerate(types):
        sums = Counter()
        for triple in score.mistakes["confusions"]:
            sums[triple[place]] += triple[2]
        assert sums == counts
    first = score.mistakes["worst"][0]
    for expected_word, found_word in zip(first["expected"].split(" "), first["found"].split(" "), strict=True):
        assert expected_word == found_word == "..." or expected_word.partition("/")[0] == found_word.partition("/")[0]


@pytest.mark.parametrize("task", [TEXTS, WORDS, "masked-lm"])
def test_the_final_evaluation_leaves_its_labels_in_the_run(tmp_path, task):
    keys = {
        "num-rounds": 1,
        "task.name": task,
        "model.family": "bert",
        "model.width": 16,
        "model.num-heads": 2,
        "model.feed-forward": 32,
        "data.num-examples": 40,
        "data.evaluation-examples": 8,
        "data.vocab-size": 300,
    }
    run_dir, threads = claim_run_directory(tmp_path / "run"), torch.get_num_threads()
    try:
        run = prepare_run(RunConfig.from_flat({**keys, "run-dir": str(run_dir)}), run_dir)
        models = GlobalModels(run.prepared_task, run.parts, run.frozen, 0)
        models.take(to_arrays(run.parts.weights()))
        finish(run, models, RunStanding(run), RoundClock(run))
    finally:
        torch.set_num_threads(threads)
    file = run_dir / "mistakes.json"
    assert file.is_file() == (task != "masked-lm")
    if file.is_file():
        assert json.loads(file.read_text())["examples"] == 8
        reopen(run_dir, 0)
        assert not file.exists()
