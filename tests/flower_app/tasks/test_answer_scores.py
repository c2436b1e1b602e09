"""Scores of answers."""

import sys
import types

import numpy as np
import pytest

from flower_app.config.sources import named_modules
from flower_app.tasks import answer_scores
from flower_app.tasks.answer_scores import exact_match, find_scorers, rouge_l, scorer_names
from flower_app.tasks.base import TaskConfig, task


def test_an_exact_match_forgives_blanks_alone():
    assert exact_match("", " 4\n", "4") == 1
    assert exact_match("", "4.", "4") == 0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    pytest.importorskip("torchmetrics")
    # Of 5 and 6 words 4 stand in the same order: 4/5 and 4/6.
    assert rouge_l("", "the cat sat on mat", "The cat is on the mat.") == pytest.approx(8 / 11)
    assert rouge_l("", "", "a") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (
            "\u043a\u043e\u0442 \u0441\u043f\u0438\u0442",
            "\u041a\u043e\u0442 \u043d\u0435 \u0441\u043f\u0438\u0442.",
            4 / 5,
        ),
        # Characters of Chinese: three of four stand in the same order.
        ("\u732b\u5750\u7740\u3002", "\u732b\u5728\u5750\u7740", 6 / 7),
        # A word of Hindi with its vowel signs is one.
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940 x", 2 / 3),
    ],
)
def test_rouge_l_reads_words_of_any_script(answer, reference, expected):
    pytest.importorskip("torchmetrics")
    assert rouge_l("", answer, reference) == pytest.approx(expected)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(answer_scores.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rouge-l needs the package torchmetrics.*pip install 'collapipe\[rouge\]'"):
        find_scorers(["rouge-l"])


@pytest.fixture
def skills(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType("skills")
    module.right = lambda question, answer, reference: answer == question + reference
    module.loss, module.numpy = module.right, lambda question, answer, reference: np.float32(0.5)
    module.one_of_numpys = lambda question, answer, reference: np.bool_(True)
    module.wrong, module.number = (lambda question, answer, reference: "yes"), 3
    monkeypatch.setitem(sys.modules, "skills", module)


@pytest.mark.usefixtures("skills")
def test_a_function_of_the_users_own_scores():
    config = TaskConfig(name="instruction", evaluate_generate="exact-match, skills:right")
    assert task(config).scores == ("loss", "perplexity", "exact_match", "right")
    scorers = find_scorers(scorer_names(config.evaluate_generate))
    assert [scorers["right"]("a", answer, "b") for answer in ("ab", "b")] == [1.0, 0.0]
    assert named_modules({"task.evaluate-generate": "exact-match,skills:right"}) == ["skills"]


@pytest.mark.usefixtures("skills")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bleu", "expected some of exact-match, rouge-l and module:function, with commas between, found 'bleu'"),
        ("exact-match,", "found ''"),
        ("skills:right,other:right", "expected each score once, found right twice"),
        ("exact-match, skills:loss", "'skills:loss': loss and perplexity are scores of the counted tokens"),
        ("skills:number", "expected a function of skills, found 3"),
        ("skills:none", "expected a function of skills, found None"),
        ("no_such_module:right", "cannot import no_such_module"),
    ],
)
def test_a_scorer_that_is_none_is_refused(value, message):
    with pytest.raises(ValueError, match=rf"task\.evaluate-generate: .*{message}"):
        find_scorers(scorer_names(value))


@pytest.mark.usefixtures("skills")
def test_numbers_of_numpy_are_scores():
    scorers = find_scorers(["skills:numpy", "skills:one_of_numpys"])
    assert [scorer("a", "b", "c") for scorer in scorers.values()] == [0.5, 1.0]


@pytest.mark.usefixtures("skills")
def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="skills:wrong: expected a number, found 'yes' for the answer 'b'"):
        find_scorers(["skills:wrong"])["wrong"]("a", "b", "c")


def test_values_out_of_range_are_refused():
    for changes, message in (
        ({"top_p": 0.0}, r"task\.top-p: expected a number in \(0, 1\]"),
        ({"temperature": -1.0}, r"task\.temperature: expected at least 0"),
        ({"date": "31.1.2026"}, r"task\.date: expected such as 2026-01-31"),
        ({"loss_on": "answers"}, r"task\.loss-on: expected one of assistant, last-answer, all"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskConfig(name="instruction", **changes)
