"""A task from outside the packages, as docs/python.md and docs/tasks.md show it, is one class."""

import re
import sys
from types import ModuleType

import pytest

from flower_app.tasks.base import TASKS, TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from helpers import task_cases
from helpers.repository import ROOT
from helpers.task_cases import options, train


@pytest.mark.slow
def test_the_task_of_the_documentation_is_learned(monkeypatch):
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    module = ModuleType("word_order")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "word_order", module)
    monkeypatch.setitem(TASKS, "word-order", "word_order:WordOrderTask")
    data = DataConfig(num_examples=800, evaluation_examples=100, vocab_size=480, max_length=40)
    found = task_cases.prepare("word-order", data, options(dropout=0.0))
    score = found.evaluator.evaluate(train("word-order", found, data, steps=60), "test")
    assert score.metrics["accuracy"] > 0.7


@pytest.mark.slow
def test_the_short_task_of_ones_own_is_learned(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Task)" in block)
    (tmp_path / "acceptability.py").write_text(source)
    assert len(source.splitlines()) <= 30
    monkeypatch.syspath_prepend(tmp_path)
    chosen = task(TaskConfig(name="acceptability:AcceptabilityTask"))
    data = DataConfig(num_examples=800, evaluation_examples=100, vocab_size=480, max_length=40)
    found = chosen.prepare(data, options(dropout=0.0), seed=0, num_clusters=2)
    score = found.evaluator.evaluate(train("acceptability:AcceptabilityTask", found, data, steps=60), "test")
    assert set(score.metrics) == set(chosen.scores) and score.metrics["matthews"] > 0.4
    assert {"good", "bad"} == set(score.references)
    assert chosen.metrics(["good", "bad"] * 2, ["good", "bad"] * 2)[0]["matthews"] == 1
    assert chosen.metrics(["good", "bad"] * 2, ["bad", "good"] * 2)[0]["matthews"] == -1


def test_a_task_that_cannot_be_imported_is_named():
    with pytest.raises(ValueError, match=r"task.name: 'no_such:Task': cannot import no_such: .*PYTHONPATH"):
        task(TaskConfig(name="no_such:Task"))
    with pytest.raises(ValueError, match="expected module:Class, found None in json"):
        task(TaskConfig(name="json:Task"))
