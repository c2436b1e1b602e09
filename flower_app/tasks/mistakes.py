"""Labels that a model gives held-out examples beside their own: scores by class, confusions, and the worst mistakes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flower_app.tasks.labelled_task import LabelledTask

_MOST_CLASSES = 100
"""Classes with scores of their own; those with the most examples."""
_MOST_IN_MATRIX = 20
"""Classes of which every pair is counted; of more the most frequent confusions."""
_MOST_CONFUSIONS = 50
_MOST_MISTAKES = 20
_MOST_WORDS = 8
"""Words with wrong tags that a mistake names."""
_LONGEST_TEXT, _LONGEST_NAME = 300, 60
"""Characters."""


class _Example(NamedTuple):
    words: Sequence[str]
    expected: Sequence[str]
    found: Sequence[str]
    loss: float
    confidence: float


def mistakes_of(
    task: LabelledTask[Any],
    words: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    found: Sequence[Sequence[str]],
    losses: Sequence[float],
    confidences: Sequence[float],
) -> dict[str, Any]:
    """Sum up what a model gets right and wrong, in a bounded number of JSON values.

    Parameters
    ----------
    task : says what its classes are
    words : of each example; a whole text as one where it has one label
    expected, found : labels of each example, and the model's: of its words, or one
    losses : plain cross-entropy of each example, mean over its labels [nat]
    confidences : probability of the model's own labels of each example, mean over them

    Returns
    -------
    ``examples``, ``wrong``, ``scored``; ``classes``, each with precision, recall, f1 and support (the number of its
    expected items); ``confusions``, triples of expected class, found class and number of labels, all of them where
    ``whole``, otherwise the most frequent mistakes; ``worst``, the mistakes of the greatest loss.
    """

    def rank(example: _Example) -> tuple[float, float]:
        # A diverged model's loss is not a number, and no loss is worse.
        return (-example.loss if math.isfinite(example.loss) else -math.inf, -example.confidence)

    examples = [_Example(*each) for each in zip(words, expected, found, losses, confidences, strict=True)]
    wrong = [example for example in examples if list(example.expected) != list(example.found)]
    pairs = Counter(
        (task.class_of(name), task.class_of(found_name))
        for example in examples
        for name, found_name in zip(example.expected, example.found, strict=True)
    )
    whole = len({name for pair in pairs for name in pair}) <= _MOST_IN_MATRIX
    if not whole:
        pairs = Counter({pair: count for pair, count in pairs.items() if pair[0] != pair[1]})
    classes = _classes(task, examples)
    return {
        "examples": len(examples),
        "wrong": len(wrong),
        "scored": task.scored,
        "classes": classes[:_MOST_CLASSES],
        "num_classes": len(classes),
        "whole": whole,
        "confusions": [
            [*(_shortened(name, _LONGEST_NAME) for name in pair), count]
            for pair, count in pairs.most_common(None if whole else _MOST_CONFUSIONS)
        ],
        "worst": [_mistake(example) for example in sorted(wrong, key=rank)[:_MOST_MISTAKES]],
    }


def _classes(task: LabelledTask[Any], examples: Sequence[_Example]) -> list[dict[str, Any]]:
    """Scores of each class that was expected or found, those with the most expected items first."""
    support, predicted, hits = Counter[str](), Counter[str](), Counter[str]()
    for example in examples:
        expected, found = task.items(example.expected), task.items(example.found)
        for counts, items in ((support, expected), (predicted, found), (hits, expected & found)):
            counts.update(str(item[0]) for item in items)
    return [
        {
            "name": _shortened(name, _LONGEST_NAME),
            # 0 where nothing is found, or nothing is there to be found.
            "precision": hits[name] / predicted[name] if predicted[name] else 0.0,
            "recall": hits[name] / support[name] if support[name] else 0.0,
            "f1": 2 * hits[name] / (predicted[name] + support[name]),
            "support": support[name],
        }
        for name in sorted(support | predicted, key=lambda name: (-support[name], name))
    ]


def _mistake(example: _Example) -> dict[str, Any]:
    expected, found = list(example.expected), list(example.found)
    if len(expected) > 1:
        places = [i for i, (e, f) in enumerate(zip(expected, found, strict=True)) if e != f]
        more = ["..."] if len(places) > _MOST_WORDS else []
        expected, found = (
            [*(f"{_shortened(example.words[i], _LONGEST_NAME)}/{names[i]}" for i in places[:_MOST_WORDS]), *more]
            for names in (expected, found)
        )
    return {
        "text": _shortened(" ".join(example.words), _LONGEST_TEXT),
        "expected": _shortened(" ".join(expected), _LONGEST_TEXT),
        "found": _shortened(" ".join(found), _LONGEST_TEXT),
        "loss": example.loss if math.isfinite(example.loss) else None,
        "confidence": example.confidence if math.isfinite(example.confidence) else None,
    }


def _shortened(text: str, longest: int) -> str:
    # Half a character is no UTF-8, which every file is written in.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
