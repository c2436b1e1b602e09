"""Kinds of data that no task learns from yet: named and refused, instead of the nearest task."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from flower_app.first_config.own_text import Columns

_SECOND_CHOICES = ("choice2", "option2", "sol2", "opb", "option_b")
_KINDS = (
    ("preference data", (("chosen",), ("rejected",))),
    ("question answering data", (("question", "questions", "query"), ("context", "passage"), ("answers", "answer"))),
    ("question answering data", (("paragraphs",),)),
    ("multiple-choice data", (("question", "query", "ctx", "sent1"), ("choices", "options", "endings", "ending0"))),
    ("multiple-choice data", (("choice1", "option1", "sol1", "opa", "option_a"), _SECOND_CHOICES)),
    ("multiple-choice data", (("question",), ("a",), ("b",), ("c",))),
    ("summaries", (("document", "article", "dialogue", "text"), ("summary", "highlights"))),
)
"""Name of a kind -> a column of each group stands in its tables."""
_CERTAIN = ("text", "texts", "content", "body")
"""Names of columns that hold the texts, whatever else is there."""
_WORDS = 3
"""Words of a value, on average, from which a column is one of texts."""


def refuse_other_kinds(columns: Columns, are_classes: Callable[[Sequence[Any]], bool]) -> None:
    """Refuse columns of preferences, questions with a context, multiple choice, and summaries."""
    names = {name.lower().partition(".")[0]: name for name in columns}
    for kind, groups in _KINDS:
        fitting = [next((names[name] for name in group if name in names), "") for group in groups]
        if all(fitting) and (len(fitting) < 2 or not are_classes(columns[fitting[-1]])):
            also = [names[name] for name in ("system", "input", "context") if name in names]
            raise _refusal(kind, list(dict.fromkeys([*fitting, *also])))


def check_written_lists(columns: Columns, chosen: Sequence[str]) -> None:
    """Refuse chosen columns of lists that were written as text, as CSV files have them."""
    for name in chosen:
        values = [value for value in columns[name][:500] if value not in (None, "")]
        if values and all(
            isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value, re.DOTALL) for value in values
        ):
            raise ValueError(
                f"init: the column {name} has lists that were written as text, such as {values[0][:40]!r}; save the "
                "table as JSON lines or parquet, which keep lists"
            )


def check_only_text(columns: Columns, chosen: str) -> None:
    """Refuse to learn from one column of texts alone, where another may be what it is for."""
    texts = [name for name, values in columns.items() if name == chosen or _is_prose(values)]
    if len(texts) > 1 and chosen.lower() not in _CERTAIN:
        raise ValueError(
            f"init: found several columns of texts ({', '.join(texts)}), and no column of labels; expected one; name "
            "it with --text-column, or --task translation with --text-column and --label-column"
        )


def _is_prose(values: Sequence[Any]) -> bool:
    """Return whether values are texts of several words, nearly all different."""
    texts = [value for value in values[:500] if isinstance(value, str) and value.strip()]
    if len(texts) < len(values[:500]) / 2:
        return False
    return statistics.fmean(len(text.split()) for text in texts) >= _WORDS and len(set(texts)) > len(texts) / 2


def _refusal(kind: str, names: Sequence[str]) -> ValueError:
    what = f"{kind} (column{'s' * (len(names) > 1)} {', '.join(names)}): CollaPipe has no task for it yet"
    if kind == "summaries":
        source, target = names[:2]
        return ValueError(
            f"{what}; --task translation --text-column {source} --label-column {target} learns one text from the other"
        )
    return ValueError(
        f"{what}; write each row as one text into a column text, and name it with --task causal-lm --text-column text"
    )
