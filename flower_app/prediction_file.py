"""A file of texts, and the same with what a model makes of each: ``collapipe predict --file in.csv --out out.csv``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.near_names import did_you_mean
from flower_app.tasks.tables import csv_line, read_table_rows
from flower_app.tasks.texts import lines

_ENDINGS = (".csv", ".tsv", ".jsonl", ".txt")
_USUAL = ("text", "source", "tokens", "sentence", "title")
PREDICTION = "prediction"
"""The column that is added."""


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Rows of a file, in its order."""

    rows: list[dict[str, Any]]
    """Columns by name, those without a header by number; of a text file the column ``text`` alone."""
    inputs: list[str | list[str]]
    """What the model is given of each row: a text, or its words where the file has them one by one."""
    header: bool
    """Whether the file names its columns."""


def read_text_rows(path: Path, column: str = "") -> TextRows:
    """Read a ``.csv``, ``.tsv`` or ``.jsonl`` table, or a text file with a text a line.

    Parameters
    ----------
    path : the file
    column : of the texts, a name or a number from 0; empty: the only column, or one with a usual name

    Raises
    ------
    ValueError, FileNotFoundError
        Naming file and line, what was found and what was expected.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--file: {path}: no such file; check the name")
    if path.suffix not in _ENDINGS:
        raise ValueError(f"--file: {path}: expected one of {', '.join(_ENDINGS)}, found {path.suffix or 'no ending'}")
    header = not column.isdecimal()
    numbered_rows = _numbered_rows(path, header)
    rows = [row for _, row in numbered_rows]
    if not rows:
        raise ValueError(f"--file: {path}: expected rows of texts, found none")
    names = list(dict.fromkeys(name for row in rows for name in row))
    chosen = column or next((name for name in _USUAL if name in names), names[0] if len(names) == 1 else "")
    if chosen not in names:
        raise ValueError(
            f"--file: {path}: expected the column {chosen or 'text'!r} of texts, found {', '.join(names)}"
            f"{did_you_mean(chosen, names)}; name it with --column"
        )
    inputs = [
        _input(row.get(chosen), f"--file: {path}, line {number}: expected a text in the column {chosen!r}, found")
        for number, row in numbered_rows
    ]
    return TextRows(rows=rows, inputs=inputs, header=header)


def _numbered_rows(path: Path, header: bool) -> list[tuple[int, dict[str, Any]]]:
    """Rows with their lines, from 1."""
    if path.suffix == ".txt":
        return [(number, {"text": line}) for number, line in enumerate(lines(path, "--file"), 1) if line.strip()]
    return read_table_rows(path, "--file", header)


def _input(value: Any, expected: str) -> str | list[str]:
    """Return a text, or the words of a list; a number is a text or a word, too."""
    words = value if isinstance(value, list) else [value]
    for word in words:
        if isinstance(word, (list, dict)):
            raise ValueError(f"{expected} {str(word)[:60]}; name a column of texts with --column")
    texts = ["" if word is None else str(word) for word in words]
    if not "".join(texts).strip():
        raise ValueError(f"{expected} none; write one, or remove the row")
    if not all(text.strip() for text in texts):
        raise ValueError(f"{expected} a list with an empty word; remove the word")
    return texts if isinstance(value, list) else texts[0]


def check_out(path: Path) -> None:
    """Refuse a file that predictions cannot be written to, before any is made.

    Raises
    ------
    ValueError, FileNotFoundError
        For an ending that is no format, a folder that is not there, or one in the file's place.
    """
    if path.suffix not in _ENDINGS:
        raise ValueError(f"--out: {path}: expected one of {', '.join(_ENDINGS)}, found {path.suffix or 'no ending'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: {path}: no folder {path.parent}; make it, or name another file")
    if path.is_dir():
        raise ValueError(f"--out: {path}: expected a file, found a folder; name another file")


def write_predictions(path: Path, rows: TextRows, predictions: Sequence[str]) -> None:
    """Write the rows, each with its prediction in a column of its own; the ending decides the format.

    Raises
    ------
    ValueError
        For an ending that is no format, or a tab or line feed where the format has no place for one.
    """
    check_out(path)
    filled = [row | {PREDICTION: text} for row, text in zip(rows.rows, predictions, strict=True)]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in filled)
    elif path.suffix == ".txt":
        # A line for each row, so that they can be laid side by side.
        text = "".join(f"{' '.join(prediction.splitlines())}\n" for prediction in predictions)
    else:
        names = [*dict.fromkeys(name for row in rows.rows for name in row if name != PREDICTION), PREDICTION]
        table = [names] * rows.header + [[row.get(name, "") for name in names] for row in filled]
        text = _table_text(path, table)
    durable.write_text(path, text, lasting=False)


def _table_text(path: Path, table: list[list[Any]]) -> str:
    if path.suffix == ".csv":
        return "".join(map(csv_line, table))
    for number, row in enumerate(table, 1):
        if any(mark in str(cell) for cell in row for mark in "\t\n"):
            raise ValueError(f"--out: {path}, row {number}: a tab or line feed fits no .tsv; write a .csv or .jsonl")
    return "".join("\t".join(map(str, row)) + "\n" for row in table)
