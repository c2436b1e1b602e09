"""Many texts at once, and long ones: `predict` works through a file of any length in batches."""

import pytest

from client_pipeline.families.families import build_parts
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.labelled import LabelledData
from flower_app.tasks.translation import TranslationData
from helpers import task_cases
from helpers.task_cases import options

DATA = DataConfig(num_examples=120, evaluation_examples=20, vocab_size=400, max_length=40)
KINDS = {
    "sequence-classification": LabelledData,
    "token-classification": LabelledData,
    "translation": TranslationData,
}
TEXTS = ["the dog " * number for number in (1, 9, 4, 2, 7)]


def prepared_parts(name):
    """A fresh model of a task, and its tokenizer."""
    model = options() if name != "translation" else options(family="transformer")
    prepared = task_cases.prepare(name, DATA, model)
    return build_parts(prepared.spec, 0), prepared.tokenizer_json


@pytest.mark.parametrize("name", KINDS)
def test_texts_are_predicted_batch_by_batch_and_come_in_their_order(name, monkeypatch):
    parts, tokenizer = prepared_parts(name)
    alone = [task(TaskConfig(name=name)).predict(parts, tokenizer, [text])[0] for text in TEXTS]
    sizes, collate = [], KINDS[name].collate
    monkeypatch.setattr(
        KINDS[name], "collate", lambda self, indices: (sizes.append(len(indices)), collate(self, indices))[1]
    )
    chosen = task(TaskConfig(name=name, evaluate_batch_size=2))
    assert chosen.predict(parts, tokenizer, TEXTS) == alone
    assert sizes == [2, 2, 1]


def test_texts_longer_than_the_model_are_cut_as_in_training_and_counted(caplog):
    parts, tokenizer = prepared_parts("sequence-classification")
    chosen = task(TaskConfig(name="sequence-classification"))
    fits = "a " * 38
    with caplog.at_level("WARNING"):
        predictions = chosen.predict(parts, tokenizer, [fits + "the dog " * 20, "the dog", fits + "a"])
    assert "2 of 3 texts are over 40 tokens and were cut" in caplog.text
    assert [predictions[0], predictions[2]] == chosen.predict(parts, tokenizer, [fits]) * 2
