"""Guess of the task that a user's columns are for, with the number and the length of its texts."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from client_pipeline.near_names import did_you_mean
from flower_app.first_config.other_kinds import check_only_text, check_written_lists, refuse_other_kinds
from flower_app.first_config.own_text import Columns, OwnText
from flower_app.tasks.base import TASKS
from flower_app.tasks.chat_template import ChatTemplate, RenderingFailed, own_template
from flower_app.tasks.data.conversations import ChatColumns, find_columns
from flower_app.tasks.data.tables import is_missing, is_missing_label, one_spelling, spelled_value
from flower_app.tasks.data.texts import blank_separated
from flower_app.tasks.labelled import check_classes, in_order, is_score, number_of
from flower_app.tasks.tagging import BIO_MARKS
from flower_app.tasks.tokenizer import load_tokenizer, train_tokenizer
from flower_app.tasks.word_pieces import train_wordpiece

_TEXTS = ("text", "sentence", "sentence1", "content", "title", "question", "review", "body", "document", "comment")
_LABELS = (
    *("label", "labels", "class", "category", "intent", "sentiment", "topic", "coarse_label", "target", "y"),
    *("gold_label", "stance", "rating", "stars", "score"),
)
_SOURCES, _TARGETS = ("source", "src", "en", "input"), ("target", "tgt", "trg", "de", "output")
_TOKENS, _TAGS = ("tokens", "words"), ("tags", "ner_tags", "pos_tags", "labels")
_ANNOTATIONS = (*_LABELS, *_TAGS, "entities", "spans", "annotations")
"""Names of columns that a text alone is not learned beside in silence."""
_MOST_LABELS = 200
_TAG = re.compile(rf"O|[{''.join(BIO_MARKS)}]-\S+")
_PAIRS = (
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "answer"),
    ("query", "passage"),
    ("query", "document"),
    ("query", "title"),
    ("claim", "evidence"),
    ("context", "response"),
    ("source", "target"),
)
"""Names of the columns of first and second texts; beside them those that differ in 1 and 2, or end in a and b."""
_YES, _NO = ("1", "yes", "y", "t", "x", "on"), ("0", "no", "n", "f", "-1", "off", "")
"""Ways to write that a label holds, and that it does not; without case, numbers and true and false as 1 and 0."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Task, labels and sizes guessed from a text."""

    task: str
    because: str
    inputs: str
    """Column of the texts; empty where files have none."""
    labels: str = ""
    """Column of labels, tags or translations."""
    names: tuple[str, ...] = ()
    """Labels, or types of spans, of all splits."""
    counts: tuple[int, ...] = ()
    """Training examples of each label; empty for spans."""
    num_examples: int
    tokens: int
    """Tokens of a long text, by the run's tokenizer: 99 in 100 are shorter; of conversations, of the longest."""
    pair: str = ""
    """Column of second texts, or of what an instruction is about."""
    lowercase: bool = True
    """Case can be folded."""
    told_apart: str = ""
    """A word whose case tells classes apart."""
    left_over: tuple[str, ...] = ()
    """Columns that nothing is made of."""
    unlabelled: tuple[str, ...] = ()
    """Splits that lack the labels: they are left out."""


def guess_task(
    text: OwnText, task: str = "", inputs: str = "", labels: str = "", pair: str = "", pretrained: str = ""
) -> Guess:
    """Guess what a text is for.

    Parameters
    ----------
    text : what was read
    task, inputs, labels, pair : what the person says, instead of a guess: a task, and names of columns
    pretrained : folder of the model whose tokenizer the run will have; empty: it trains one

    Raises
    ------
    ValueError
        If a column is not there, or none fits the task; the message lists the columns.
    """
    columns = text.columns["train"]
    for option, name in (("--text-column", inputs), ("--label-column", labels), ("--pair-column", pair)):
        if name and name not in columns:
            raise ValueError(
                f"{option}: no column {name!r}, found {', '.join(columns)}{did_you_mean(name, columns)}; name one of "
                "them"
            )
    if task and task not in TASKS:
        raise ValueError(f"--task: expected one of {', '.join(TASKS)}, found {task!r}{did_you_mean(task, TASKS)}")
    is_named = bool(inputs)
    chats = None
    if task == "instruction" or not (task or inputs or labels or pair):
        if not task:
            refuse_other_kinds(columns, _few_values)
        chats = find_columns(columns, inputs, labels, pair, _few_values)
    if chats is not None:
        chats.check_context("--pair-column", pair)
        pair = chats.context
        chosen, because, inputs, labels = "instruction", _columns_of(chats), chats.question, chats.answer
    else:
        chosen, because, inputs, labels = _chosen(text, task, inputs, labels)
    check_written_lists(columns, [inputs, *filter(None, [labels])])
    if chats is not None and not task:
        _check_rated(columns)
    if chosen == "sequence-classification":
        # A missing label is refused with its line when the data is loaded.
        label_texts = [str(value) for value in columns[labels] if not is_missing_label(value)]
        check_classes(label_texts, f"init: the column {labels}")
        if any(name.startswith("B-") for name in label_texts) and all(map(_TAG.fullmatch, label_texts)):
            raise ValueError(
                f"init: the column {labels} has tags, one a word (column {inputs}); expected the sentences: write a "
                "word and its tag on each line of a .conll file, with a blank line behind each sentence"
            )
        if not (is_named or pair):
            inputs, pair = _pair_of({name: columns[name] for name in columns if name != labels}) or (inputs, "")
    elif pair and chats is None:
        raise ValueError(f"--pair-column: expected pairs of texts with labels, found {chosen}; leave it out")
    unlabelled = tuple(text.unlabelled(labels)) if labels else ()
    labelled = {split: values for split, values in text.columns.items() if split not in unlabelled}
    names, counts = _names(labelled, chosen, labels)
    read = [inputs, *filter(None, [labels if chosen == "translation" else pair])]
    sides = [[" ".join(_words(value)) for value in columns[name]] for name in read]
    told_apart = ""
    if chosen == "sequence-classification":
        told_apart = case_tells(
            list(map(" ".join, zip(*sides, strict=True))), [str(value) for value in columns[labels]]
        )
    lowercase = chosen not in ("translation", "token-classification", "instruction") and not told_apart
    if chats is None:
        tokens = long_text(sides, task=chosen, lowercase=lowercase, pretrained=pretrained)
    else:
        tokens = longest_conversation(columns, chats, pretrained)
    return Guess(
        task=chosen,
        because=because,
        inputs=inputs,
        labels=labels,
        names=names,
        counts=counts,
        num_examples=len(sides[0]),
        tokens=tokens,
        pair=pair,
        lowercase=lowercase,
        told_apart=told_apart,
        left_over=tuple(name for name in columns if name not in (inputs, labels, pair, chats and chats.system)),
        unlabelled=unlabelled,
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
    if not (inputs or labels):
        refuse_other_kinds(columns, _few_values)
    if task == "instruction":
        raise ValueError(
            f"--task instruction: expected a column of messages, or of questions with their answers, found "
            f"{', '.join(columns)}; name them with --text-column and --label-column"
        )
    lists = [name for name, values in columns.items() if any(isinstance(value, list) for value in values[:50])]
    if task in ("", "token-classification") and len(lists) >= 2:
        tokens = inputs or _first(_TOKENS, lists) or lists[0]
        tags = labels or _first(_TAGS, [name for name in lists if name != tokens]) or lists[-1]
        return "token-classification", f"lists in the columns {tokens} and {tags}", tokens, tags
    if task in ("", "token-classification") and (between_blanks := _words_and_tags(columns, inputs, labels)):
        tokens, tags = between_blanks
        return "token-classification", f"words and tags between blanks in the columns {tokens} and {tags}", tokens, tags
    if task == "token-classification":
        if inputs and labels:
            return task, "as asked", inputs, labels
        raise ValueError(
            f"--task {task}: expected a column of words and one of as many tags, found {', '.join(columns)}; name them "
            "with --text-column and --label-column"
        )
    source, target = _first(_SOURCES, columns), _first(_TARGETS, columns)
    if task == "translation" or (not task and source and target and not _few_values(columns[target])):
        classes = _first(_LABELS, [name for name, values in columns.items() if _few_values(values)])
        if classes and not (task or inputs or labels):
            raise ValueError(
                f"init: found texts in the columns {source} and {target}, and classes in {classes}; name the task with "
                "--task translation or --task sequence-classification"
            )
        source, target = inputs or source, labels or target
        if not (source and target):
            raise ValueError(
                f"--task translation: expected the columns source and target, found {', '.join(columns)}; name them "
                "with --text-column and --label-column"
            )
        return "translation", f"texts in the columns {source} and {target}", source, target
    if task in ("masked-lm", "causal-lm"):
        if not inputs:
            inputs = _first(("text", "content", "body"), columns) or _longest(columns)
            check_only_text(columns, inputs)
        return task, "as asked", inputs, ""
    is_named = bool(inputs)
    usual = labels or _first(_LABELS, columns)
    _check_single_label(columns, usual)
    labels = labels or _label_column(columns, inputs)
    if usual and labels in ("", usual) and len(alone := _different(columns[usual])) == 1:
        raise ValueError(
            f"init: the column {usual} has one class alone, {alone.pop()!r}; expected two or more: name another with "
            "--label-column, or learn from the texts alone with --task masked-lm"
        )
    inputs = inputs or _first(_TEXTS, [name for name in columns if name != labels]) or _longest(columns, but=labels)
    if labels:
        number = len(_different(columns[labels]))
        return "sequence-classification", f"{number} different values in the column {labels}", inputs, labels
    for name, values in columns.items():
        scores = [str(value) for value in values if value not in (None, "")]
        if name != inputs and is_score(scores):
            check_classes(scores, f"init: the column {name}")
    if task:
        raise ValueError(
            f"--task {task}: found no column of labels among {', '.join(columns)}; name it with --label-column"
        )
    if not is_named:
        check_written_lists(columns, [inputs])
        check_only_text(columns, inputs)
        if annotated := _first(_ANNOTATIONS, [name for name in columns if name != inputs]):
            check_written_lists(columns, [annotated])
            shown = next((value for value in columns[annotated] if value not in (None, "")), None)
            raise ValueError(
                f"init: the column {annotated} (such as {str(shown)[:40]!r}) does not look like classes with "
                f"several examples each; if it is, name it with --label-column {annotated}; to learn from the texts "
                f"alone, name --task masked-lm --text-column {inputs}"
            )
    return "masked-lm", f"texts in the column {inputs}, and no column of labels", inputs, ""


def _columns_of(chats: ChatColumns) -> str:
    names = [name for name in (chats.system, chats.question, chats.context, chats.answer) if name]
    return f"{chats.form} in the column{'s' * (len(names) > 1)} {', '.join(names)}"


def _words_and_tags(columns: Columns, inputs: str, labels: str) -> tuple[str, str] | None:
    """Find columns of words between blanks and of as many tags; None: there are no two."""
    for tags in [labels] if labels else columns:
        if not all(_TAG.fullmatch(tag) for value in columns[tags] for tag in _words(value)):
            continue
        counts = [len(_words(value)) for value in columns[tags]]
        others = [inputs] if inputs else [name for name in columns if name != tags]
        alike = [name for name in others if [len(_words(value)) for value in columns[name]] == counts]
        if alike and max(counts) > 1:
            return _first((*_TOKENS, *_TEXTS), alike) or alike[0], tags
    return None


def _pair_of(columns: Columns) -> tuple[str, str] | None:
    """Find the columns of first and second texts by their names; None: there is no such pair."""

    def has_words(values: Sequence[Any]) -> bool:
        """Return whether values are texts, and neither numbers nor lists."""
        texts = [value for value in values[:500] if value is not None]
        return bool(texts) and all(isinstance(text, str) and not math.isfinite(number_of(text)) for text in texts)

    names = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name, values in columns.items() if has_words(values)}
    variants = [(name, re.sub("1|first", lambda found: {"1": "2"}.get(found[0], "second"), name)) for name in names]
    variants += [(name, f"{name[:-1]}b") for name in names if name.endswith("a")]
    for first, second in (*_PAIRS, *variants):
        if first != second and first in names and second in names:
            return names[first], names[second]
    return None


def _check_single_label(columns: Columns, labels: str) -> None:
    """Refuse labels that stand in several columns, or several in a cell."""
    if labels:
        if any(isinstance(value, (list, tuple)) for value in columns[labels]):
            raise ValueError(
                f"init: the column {labels} has lists of labels: a text with several labels is no task here; expected "
                "one label in each row"
            )
        names = {str(value).strip() for value in columns[labels]}
        for name in sorted(names):
            parts = [part.strip() for part in re.split(r"[|;,]", name)]
            if len(parts) > 1 and all(part in names for part in parts):
                raise ValueError(
                    f"init: the column {labels} has {name!r}, which is several labels of the others: a text with "
                    "several labels is no task here; expected one label in each row"
                )
        return
    marks = {name: [_mark(value) for value in values] for name, values in columns.items()}
    binary = [name for name, cells in marks.items() if {"yes", "no"} == set(cells)]
    if len(binary) < 2:
        return
    ones = [row.count("yes") for row in zip(*(marks[name] for name in binary), strict=True)]
    listed = ", ".join(binary)
    if set(ones) == {1}:
        raise ValueError(
            f"init: the columns {listed} are one label, written as yes or no in each (one-hot); expected one "
            f"column with its name: in pandas, of 0 and 1, table[{binary}].idxmax(axis=1)"
        )
    raise ValueError(
        f"init: the columns {listed} are labels of yes or no each, and a text may have several: expected one column of "
        "labels; name one of them with --label-column"
    )


def _check_rated(columns: Columns) -> None:
    """Refuse conversations with a column that says which of their answers are good."""
    rated = next((name for name in columns if name.lower() in ("label", "labels", "rating", "score")), "")
    if rated and {_mark(value) for value in columns[rated]} <= {"yes", "no"}:
        raise ValueError(
            f"init: the column {rated} says yes or no of each answer (unpaired preference data): CollaPipe has no task "
            "for it yet; keep the good rows alone, or name --task instruction to learn all answers"
        )


def _mark(value: Any) -> str:
    """Return ``yes`` or ``no`` for a cell that says whether a label holds, and nothing for another."""
    cell = "" if is_missing(value) else spelled_value(str(value).strip()).lower()
    return "yes" if cell in _YES else "no" if cell in _NO else ""


def _asked(task: str, *possible: str) -> str:
    if task and task not in possible:
        raise ValueError(f"--task: expected {' or '.join(possible)} for these files, found {task!r}; leave it out")
    return task or possible[0]


def _first(wanted: Sequence[str], names: Sequence[str] | Columns) -> str:
    by_letters = {name.lower().rpartition(".")[2]: name for name in names}
    return next((by_letters[name] for name in wanted if name in by_letters), "")


def _few_values(values: Sequence[Any]) -> bool:
    different = len(_different(values))
    return 1 < different <= min(_MOST_LABELS, max(2, len(values) // 5))


def _different(values: Sequence[Any]) -> set[str]:
    """Return values as texts, one spelling for each."""
    texts = {str(value).strip() for value in values if not is_missing_label(value)}
    same = one_spelling(texts)
    return {same.get(text, text) for text in texts}


def _label_column(columns: Columns, inputs: str) -> str:
    others = [name for name in columns if name != inputs]
    fitting = [name for name in others if _few_values(columns[name])]
    named = _first(_LABELS, fitting)
    fitting = [name for name in fitting if not any(isinstance(value, list) for value in columns[name])] or fitting
    return named or min(fitting, key=lambda name: len(_different(columns[name])), default="")


def _longest(columns: Columns, but: str = "") -> str:
    names = [name for name in columns if name != but]
    if not names:
        raise ValueError(f"init: expected a column of texts beside {but!r}, found none")
    return max(names, key=lambda name: statistics.fmean(len(str(value)) for value in columns[name]))


def _names(splits: Mapping[str, Columns], task: str, labels: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if task == "sequence-classification":
        # Rows without a label are refused with their line when the data is loaded.
        values = {
            split: [text for value in columns[labels] if (text := str(value).strip()) and not is_missing_label(value)]
            for split, columns in splits.items()
        }
        same = one_spelling(value for split in values.values() for value in split)
        names = in_order({same.get(value, value) for split in values.values() for value in split})
        counts = Counter(same.get(value, value) for value in values["train"])
        return names, tuple(counts[name] for name in names)
    if task == "token-classification":
        tags = {str(tag) for columns in splits.values() for row in columns[labels] for tag in _words(row)}
        kinds = {tag[2:] for tag in tags if tag[:1] in BIO_MARKS and tag[1:2] == "-"}
        same = one_spelling(kinds)
        return in_order({same.get(kind, kind) for kind in kinds}), ()
    return (), ()


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else blank_separated(str(value))


_MEASURED = 20_000
"""Texts: a tokenizer of more is the same for this."""
_RENDERED = 50
"""Longest conversations that are rendered."""
_TELLING = 0.05
"""Share of the examples that case may tell apart."""


def vocab_size_of(task: str) -> int:
    """Return the largest vocabulary of a tokenizer that is trained for a task."""
    return 8000 if task == "translation" else 6000


def long_text(columns: Sequence[Sequence[str]], *, task: str, lowercase: bool, pretrained: str = "") -> int:
    """Return the tokens that 99 of 100 examples have at most, marks included.

    Parameters
    ----------
    columns : texts of each column of inputs: one, both of pairs, or a translation's two sides
    task : decides which tokenizer is trained
    lowercase : whether that folds case
    pretrained : folder of the model whose tokenizer is used; empty: one is trained
    """
    step = max(1, len(columns[0]) // _MEASURED)
    sampled = [list(column[::step]) for column in columns]
    texts = [text for column in sampled for text in column]
    if pretrained:
        tokenizer = load_tokenizer(pretrained, "--pretrained", complete=False)
    elif task in ("translation", "causal-lm"):
        tokenizer = train_tokenizer(texts, vocab_size_of(task), False)
    else:
        tokenizer = train_wordpiece(texts, vocab_size_of(task), False, lowercase)
    counts = [[len(ids) for ids in tokenizer.encode(column)] for column in sampled]
    if task == "translation":
        lengths = sorted(2 + max(sides) for sides in zip(*counts, strict=True))
    else:
        # RoBERTa has four marks around a pair.
        lengths = sorted(2 * len(columns) + sum(texts) for texts in zip(*counts, strict=True))
    return lengths[min(len(lengths) - 1, math.ceil(0.99 * len(lengths)))]


def longest_conversation(columns: Columns, chats: ChatColumns, pretrained: str) -> int:
    """Return the tokens of the longest conversation in its chat template, marks included."""
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    conversations = [chats.messages(row, f"init: row {number}") for number, row in enumerate(rows, 1)]
    texts = [" ".join(message["content"] for message in messages) for messages in conversations]
    if pretrained:
        tokenizer = load_tokenizer(pretrained, "--pretrained", complete=False)
    else:
        tokenizer = train_tokenizer(texts, vocab_size_of("instruction"), False)
    chat = ChatTemplate.chosen(tokenizer, "" if own_template(tokenizer) else "chatml", "")
    counts = [len(ids) for ids in tokenizer.encode_each(texts)]
    # What the template adds is about the same for all.
    longest = sorted(range(len(texts)), key=counts.__getitem__)[-_RENDERED:]
    lengths = [0]
    with chat.renderer() as render:
        chat = chat.checked(render, gets_marks=not pretrained, needs_marks=False)
        for i in longest:
            # What cannot be rendered is refused with its line when the data is loaded.
            with suppress(RenderingFailed):
                lengths.append(len(chat.counted(render, conversations[i], "all").ids))
    return max(lengths)


def case_tells(texts: Sequence[str], labels: Sequence[str]) -> str:
    """Return a word whose case tells classes apart, such as ``Sie`` of ``sie``; empty where none does so often."""
    variants: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for text, label in zip(texts, labels, strict=True):
        for word in set(text.split()):
            variants[word.lower()][word][label] += 1
    for counts_by_word in variants.values():
        apart = sum(max(counts.values()) for counts in counts_by_word.values())
        together = max(sum(counts_by_word.values(), Counter()).values())
        if apart - together > _TELLING * len(texts):
            return next(iter(counts_by_word))
    return ""
