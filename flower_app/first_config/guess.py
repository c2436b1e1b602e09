"""Which task somebody's columns are for, and how long and how many its texts are."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from client_pipeline.near_names import did_you_mean
from flower_app.first_config.own_text import Columns, OwnText
from flower_app.tasks.base import TASKS
from flower_app.tasks.labelled import in_order

_TEXTS = ("text", "sentence", "sentence1", "content", "title", "question", "review", "body", "document", "comment")
_LABELS = ("label", "labels", "class", "category", "intent", "sentiment", "topic", "coarse_label", "target", "y")
_SOURCES, _TARGETS = ("source", "src", "en", "input"), ("target", "tgt", "trg", "de", "output")
_TOKENS, _TAGS = ("tokens", "words"), ("tags", "ner_tags", "pos_tags", "labels")
_MOST_LABELS = 200
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Scripts without blanks between words: a tokenizer takes each character."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What the text is for."""

    task: str
    because: str
    inputs: str
    """Column of the texts; empty where files have none."""
    labels: str = ""
    """Column of labels, tags or translations."""
    names: tuple[str, ...] = ()
    """Labels, or types of spans, of all splits."""
    counts: tuple[int, ...] = ()
    """Of each in training; empty for spans."""
    num_examples: int
    tokens: int
    """Of a long text: 99 in 100 are shorter."""
    wide: bool
    """Whether its script has no blanks between words."""


def guess_task(text: OwnText, task: str = "", inputs: str = "", labels: str = "") -> Guess:
    """Guess what a text is for.

    Parameters
    ----------
    text : what was read
    task, inputs, labels : what the person says, instead of a guess: a task, and names of columns

    Raises
    ------
    ValueError
        If a column is not there, or none fits the task; the message lists the columns.
    """
    columns = text.columns["train"]
    for option, name in (("--text-column", inputs), ("--label-column", labels)):
        if name and name not in columns:
            raise ValueError(
                f"{option}: no column {name!r}, found {', '.join(columns)}{did_you_mean(name, columns)}; name one of "
                "them"
            )
    if task and task not in TASKS:
        raise ValueError(f"--task: expected one of {', '.join(TASKS)}, found {task!r}{did_you_mean(task, TASKS)}")
    chosen, because, inputs, labels = _chosen(text, task, inputs, labels)
    texts = columns[inputs]
    wide = _is_wide(texts)
    names, counts = _names(text, chosen, labels)
    return Guess(
        task=chosen,
        because=because,
        inputs=inputs,
        labels=labels,
        names=names,
        counts=counts,
        num_examples=len(texts),
        tokens=_long(texts, wide),
        wide=wide,
    )


def _chosen(text: OwnText, task: str, inputs: str, labels: str) -> tuple[str, str, str, str]:
    """Task, the reason, and the columns."""
    columns = text.columns["train"]
    if text.kind == "parallel":
        return _asked(task, "translation"), "two files, line by line", "source", "target"
    if text.kind == "tagged":
        return _asked(task, "token-classification", "masked-lm"), "a word and its tag on each line", "tokens", "tags"
    if text.kind == "plain":
        return _asked(task, "masked-lm", "causal-lm"), "plain text, a text a line", "text", ""
    lists = [name for name, values in columns.items() if any(isinstance(value, list) for value in values[:50])]
    if task in ("", "token-classification") and len(lists) >= 2:
        tokens = inputs or _first(_TOKENS, lists) or lists[0]
        tags = labels or _first(_TAGS, [name for name in lists if name != tokens]) or lists[-1]
        return "token-classification", f"lists in the columns {tokens} and {tags}", tokens, tags
    source, target = _first(_SOURCES, columns), _first(_TARGETS, columns)
    if task == "translation" or (not task and source and target and not _few_values(columns[target])):
        source, target = inputs or source, labels or target
        if not (source and target):
            raise ValueError(
                f"--task translation: expected the columns source and target, found {', '.join(columns)}; name them "
                "with --text-column and --label-column"
            )
        return "translation", f"texts in the columns {source} and {target}", source, target
    if task in ("masked-lm", "causal-lm"):
        return task, "as asked", inputs or _longest(columns), ""
    labels = labels or _label_column(columns, inputs)
    inputs = inputs or _first(_TEXTS, [name for name in columns if name != labels]) or _longest(columns, but=labels)
    if labels:
        number = len({str(value) for value in columns[labels]})
        return "sequence-classification", f"{number} different values in the column {labels}", inputs, labels
    if task:
        raise ValueError(
            f"--task {task}: found no column of labels among {', '.join(columns)}; name it with --label-column"
        )
    return "masked-lm", f"texts in the column {inputs}, and no column of labels", inputs, ""


def _asked(task: str, *possible: str) -> str:
    if task and task not in possible:
        raise ValueError(f"--task: expected {' or '.join(possible)} for these files, found {task!r}; leave it out")
    return task or possible[0]


def _first(wanted: Sequence[str], names: Sequence[str] | Columns) -> str:
    by_letters = {name.lower().rpartition(".")[2]: name for name in names}
    return next((by_letters[name] for name in wanted if name in by_letters), "")


def _few_values(values: Sequence[Any]) -> bool:
    different = len({str(value) for value in values})
    return 1 < different <= min(_MOST_LABELS, max(2, len(values) // 5))


def _label_column(columns: Columns, inputs: str) -> str:
    others = [name for name in columns if name != inputs]
    fitting = [name for name in others if _few_values(columns[name])]
    named = _first(_LABELS, fitting)
    return named or min(fitting, key=lambda name: len({str(v) for v in columns[name]}), default="")


def _longest(columns: Columns, but: str = "") -> str:
    names = [name for name in columns if name != but]
    if not names:
        raise ValueError(f"init: expected a column of texts beside {but!r}, found none")
    return max(names, key=lambda name: statistics.fmean(len(str(value)) for value in columns[name]))


def _names(text: OwnText, task: str, labels: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if task == "sequence-classification":
        values = {split: [str(value).strip() for value in columns[labels]] for split, columns in text.columns.items()}
        names, counts = in_order({value for split in values.values() for value in split}), Counter(values["train"])
        return names, tuple(counts[name] for name in names)
    if task == "token-classification":
        tags = {str(tag) for columns in text.columns.values() for row in columns[labels] for tag in _words(row)}
        return in_order({tag[2:] for tag in tags if tag[:2] in ("B-", "I-")}), ()
    return (), ()


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else str(value).split()


def _is_wide(texts: Sequence[Any]) -> bool:
    joined = "".join(" ".join(_words(text)) for text in texts[:500])
    return len(_WIDE.findall(joined)) > len(joined) / 4


def _long(texts: Sequence[Any], wide: bool) -> int:
    """Tokens that 99 of 100 texts have at most, the two marks included: about 1.4 to a word, 1 to a character."""
    lengths = sorted(len("".join(words)) if wide else math.ceil(1.4 * len(words)) for words in map(_words, texts))
    return 2 + lengths[min(len(lengths) - 1, math.ceil(0.99 * len(lengths)))]
