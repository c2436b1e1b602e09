"""The labels of each task, which the server is sent, and what README, index and threat model say of them."""

import re

import pytest

from client_pipeline.partition.parts import IGNORED_LABEL, targets
from flower_app.tasks import chat_template
from flower_app.tasks.base import TASKS, TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig, load_pairs
from flower_app.tasks.tokenizer import TextTokenizer
from helpers.chat_cases import rendered_here
from helpers.repository import ROOT
from helpers.task_cases import options, prepare

FAMILIES = {"translation": "transformer", "causal-lm": "gpt2", "instruction": "gpt2"}
DATA = DataConfig(num_examples=40, evaluation_examples=10, vocab_size=400, max_length=128)
TEXTS = {
    "causal-lm": "the whole text",
    "instruction": "the whole answers",
    "translation": "the whole target",
    "masked-lm": "those words",
}
"""Task whose labels are words -> the threat model's phrase."""


def sent_labels(name):
    """Return the prepared task, a batch of four examples, and each one's labels that carry a loss."""
    prepared = prepare(name, DATA, options(family=FAMILIES.get(name, "bert")))
    share = task(TaskConfig(name=name)).cluster_data(DATA, prepared.tokenizer_json, 0, 1, 0)
    batch = share.collate(range(4), seed=1)
    labels = [[i for i in row.reshape(-1).tolist() if i != IGNORED_LABEL] for row in targets(batch)["labels"]]
    return prepared, batch, labels


@pytest.mark.parametrize("name", TASKS)
def test_the_labels_that_the_server_is_sent_say_what_the_page_says(name, monkeypatch):
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)
    prepared, batch, labels = sent_labels(name)
    page = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    (phrase,) = re.findall(rf"^ *\| `{name}` \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE)
    assert phrase.startswith(TEXTS.get(name, ("where", "the class")))
    if name in ("translation", "instruction"):
        tokenizer = TextTokenizer.from_json(prepared.tokenizer_json)
        assert set(tokenizer.decode(labels)) <= set(load_pairs(DATA, "train", 0).targets)
    elif name == "causal-lm":
        # Every token of the input but the mark before the text.
        inputs = [row[mask].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        assert labels == [row[1:] for row in inputs]
    elif name == "masked-lm":
        hidden = batch["labels"] != IGNORED_LABEL
        assert 0 < hidden.sum() < 0.3 * batch["attention_mask"].sum() and sum(map(len, labels)) == hidden.sum()
    else:
        # A class an example, or a tag a word: numbers below that of the classes, fewer than the input's tokens.
        assert max(map(max, labels)) < int(prepared.spec.config["num_labels"]) < DATA.vocab_size
        assert sum(map(len, labels)) < batch["attention_mask"].sum()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/threat-model.md"])
def test_the_pages_say_per_task_that_labels_leave_the_site(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.search(r"[Tt]ext (never leaves|stays on) (a|its) cluster", text)
    label_lines = "\n".join(line for line in re.split(r"\n\s*\n|\n\* ", text) if "label" in line.lower())
    assert all(f"`{name}`" in label_lines or f"| `{name}` |" in text for name in TASKS)
    assert re.search(r"labels are\s+the text|`causal-lm` they are the text", text)
