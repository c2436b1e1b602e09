"""Scores of answers: exact match, ROUGE-L, and functions of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

Scorer = Callable[[str, str, str], float]
"""Score of an answer, given question, answer and reference."""

KEY = "task.evaluate-generate"
_WITHOUT_BLANKS = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
"""Names of characters whose scripts write no blanks between words."""


def exact_match(question: str, answer: str, reference: str) -> float:
    """Return 1 where the answer is the reference, blanks around them aside; else 0."""
    return float(answer.strip() == reference.strip())


def rouge_l(question: str, answer: str, reference: str) -> float:
    """Return ROUGE-L's F1: of the longest common subsequence of words, without case and punctuation."""
    from torchmetrics.functional.text import rouge_score

    # By itself torchmetrics keeps the letters a to z and digits alone.
    scores = rouge_score(answer, reference, normalizer=_in_words, tokenizer=str.split, rouge_keys="rougeL")
    return float(scores["rougeL_fmeasure"])


def _in_words(text: str) -> str:
    """Return the words of a text of any script, with blanks between; where a script writes none, its characters."""

    def spaced(character: str) -> str:
        if unicodedata.category(character)[0] not in "LMN":
            return " "
        return f" {character} " if unicodedata.name(character, "").startswith(_WITHOUT_BLANKS) else character

    return "".join(map(spaced, text.lower()))


_OF_TOKENS = ("loss", "perplexity")
SCORERS: dict[str, Scorer] = {"exact-match": exact_match, "rouge-l": rouge_l}


def scorer_names(value: str) -> tuple[str, ...]:
    """Return what ``task.evaluate-generate`` lists.

    Raises
    ------
    ValueError
        For a name that is neither known nor ``module:function``, one that comes twice, or one of another score.
    """
    names = tuple(name.strip() for name in value.split(",")) if value.strip() else ()
    for name in names:
        module, _, function = name.partition(":")
        if name not in SCORERS and not (module and function.isidentifier()):
            raise ValueError(
                f"{KEY}: expected some of {', '.join(SCORERS)} and module:function, with commas between, found {name!r}"
            )
    metrics = [metric_name(name) for name in names]
    if twice := next((name for name in metrics if metrics.count(name) > 1), ""):
        raise ValueError(f"{KEY}: expected each score once, found {twice} twice in {value!r}")
    if clash := next((name for name in names if metric_name(name) in _OF_TOKENS), ""):
        raise ValueError(
            f"{KEY}: {clash!r}: {' and '.join(_OF_TOKENS)} are scores of the counted tokens; rename the function"
        )
    return names


def metric_name(scorer: str) -> str:
    """Return the name of a scorer's metric: ``rouge_l`` of ``rouge-l``, ``right`` of ``skills:right``."""
    return scorer.rpartition(":")[2].replace("-", "_")


def find_scorers(names: Sequence[str]) -> dict[str, Scorer]:
    """Return the scorers by the names of their metrics.

    Raises
    ------
    ValueError
        If a package is missing, a module cannot be imported or has no such function.
    """
    if "rouge-l" in names and importlib.util.find_spec("torchmetrics") is None:
        raise ValueError(
            f"{KEY}: rouge-l needs the package torchmetrics, which is missing; install it: pip install "
            "'collapipe[rouge]'"
        )
    return {metric_name(name): SCORERS.get(name) or _function(name) for name in names}


def _function(name: str) -> Scorer:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        raise ValueError(
            f"{KEY}: {name!r}: cannot import {module_name}: {error}; expected module:function, importable by the "
            "server (installed, or in a folder of PYTHONPATH)"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{KEY}: {name!r}: expected a function of {module_name}, found {function!r}")

    def score(question: str, answer: str, reference: str) -> float:
        value = function(question, answer, reference)
        if not (isinstance(value, (numbers.Real, np.bool_)) and math.isfinite(value)):
            raise ValueError(f"{KEY}: {name}: expected a number, found {value!r} for the answer {answer[:60]!r}")
        return float(value)

    return score
