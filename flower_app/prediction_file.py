"""A file of texts, and the same with what a model makes of each: ``collapipe predict --file in.csv --out out.csv``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.near_names import did_you_mean
from flower_app.tasks.data.cells import csv_line
from flower_app.tasks.data.conversations import ASSISTANT, ChatColumns, Message, check_messages, find_columns
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.tables import finite, is_missing, read_table_rows
from flower_app.tasks.data.texts import blank_separated, ending, lines

_ENDINGS = (".csv", ".tsv", ".jsonl", ".txt")
_ASKED = ("prompt", "instruction", "question", "query", "problem")
_USUAL = ("text", "source", "tokens", "sentence", "title")
PREDICTION = "prediction"
"""The column that is added."""
PROBABILITY = "p_"
"""Prefix of the columns of probabilities, before the label."""


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Rows of a file, in its order."""

    rows: list[dict[str, Any]]
    """Columns by name, those without a header by number; of a text file the column ``text`` alone."""
    inputs: Sequence[str | list[str] | tuple[str, str] | list[Message]]
    """Inputs of the model, one a row: a text, its words where the file splits them, a pair of texts, or messages."""
    header: bool
    """The file names its columns."""


def read_text_rows(path: Path, column: str = "", pair_column: str = "", words_column: str = "") -> TextRows:
    """Read a ``.csv``, ``.tsv`` or ``.jsonl`` table, or a text file with a text a line.

    Parameters
    ----------
    path : the file
    column : of the texts, a name or a number from 0; empty: the only column, or one with a usual name
    pair_column : of the second texts, for a model of pairs; empty: the model takes one text
    words_column : whose texts are words between blanks, as a tagger's training data has them; empty: none

    Raises
    ------
    ValueError, FileNotFoundError
        Naming file and line, what was found and what was expected.
    """
    header = not column.isdecimal()
    numbered_rows = _numbered_rows(path, header)
    rows = [row for _, row in numbered_rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    chosen = column or next((name for name in _USUAL if name in names), names[0] if len(names) == 1 else "")
    if chosen not in names:
        raise ValueError(
            f"--file: {path}: expected the column {chosen or 'text'!r} of texts, found {', '.join(names)}"
            f"{did_you_mean(chosen, names)}; name it with --column"
        )
    if pair_column and pair_column not in names:
        raise ValueError(
            f"--file: {path}: expected the column {pair_column!r} of second texts, as in training, found "
            f"{', '.join(names)}{did_you_mean(pair_column, names)}"
        )
    inputs_by_column = {
        name: [
            _input(row.get(name), f"--file: {path}, line {number}: expected a text in the column {name!r}, found")
            for number, row in numbered_rows
        ]
        for name in filter(None, (chosen, pair_column))
    }
    if chosen == words_column:
        inputs_by_column[chosen] = [
            blank_separated(value) if isinstance(value, str) else value for value in inputs_by_column[chosen]
        ]
    inputs: list[str | list[str] | tuple[str, str]] = [*inputs_by_column[chosen]]
    if pair_column:
        firsts, seconds = (
            [value if isinstance(value, str) else " ".join(value) for value in inputs_by_column[name]]
            for name in (chosen, pair_column)
        )
        inputs = [*zip(firsts, seconds, strict=True)]
    return TextRows(rows=rows, inputs=inputs, header=header)


def read_question_rows(path: Path, column: str, context: str) -> TextRows:
    """Read a table of conversations or of questions, or a text file with a question a line.

    Parameters
    ----------
    path : the file
    column : of the conversations or the questions; empty: as in training data
    context : column of what the questions are about; empty: as in training data

    Returns
    -------
    The rows; an input ends with a question: answers behind the last one are left out.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming file and line, what was found and what was expected.
    """
    numbered_rows = _numbered_rows(path, header=True)
    rows = [row for _, row in numbered_rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    column, context = (name if name in names else "" for name in (column, context))
    chats = find_columns({name: [row.get(name) for row in rows] for name in names}, column, "", context)
    if chats is None:
        # Questions without answers.
        column = column or next((name for name in (*_ASKED, *_USUAL) if name in names), "")
        if not column:
            raise ValueError(
                f"--file: {path}: expected a column of messages or questions, found {', '.join(names)}; name it with "
                "--column"
            )
        context = context or next((name for name in ("input", "context") if name in names and name != column), "")
        chats = ChatColumns(form="", question=column, context=context, system="system" if "system" in names else "")
    inputs = []
    for number, row in numbered_rows:
        place = f"--file: {path}, line {number}"
        messages = chats.messages(row, place)
        while messages and messages[-1]["role"] == ASSISTANT:
            messages.pop()
        check_messages(messages, place, answered=False)
        inputs.append(messages)
    return TextRows(rows=rows, inputs=inputs, header=True)


def _numbered_rows(path: Path, header: bool) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a file with their lines; of a text file its column ``text``."""
    if not path.is_file():
        raise FileNotFoundError(f"--file: {path}: no such file; check the name")
    if ending(path) not in _ENDINGS:
        raise ValueError(f"--file: {path}: expected one of {', '.join(_ENDINGS)}, found {path.suffix or 'no ending'}")
    if ending(path) == ".txt":
        texts = [*lines(path, "--file")]
        # Lines behind the last text are none; another that is blank has no prediction.
        while not texts[-1].strip():
            texts.pop()
        numbered_rows = [(i, {"text": line}) for i, line in enumerate(texts, 1)]
    else:
        numbered_rows = read_table_rows(path, "--file", header)
    if not numbered_rows:
        raise ValueError(f"--file: {path}: expected rows of texts, found none")
    return numbered_rows


def check_pairs(data: DataConfig, inputs: Sequence[Any]) -> None:
    """Refuse single texts for a model of pairs, and pairs for a model of texts."""
    for value in inputs:
        if isinstance(value, str) == bool(data.pair_column):
            expected = "a pair (text, second text)" if data.pair_column else "a text"
            raise ValueError(
                f"predict: expected {expected}, for data.pair-column is {data.pair_column!r}, found {value!r}"
            )


def typed_inputs(data: DataConfig, texts: list[str]) -> Sequence[Any]:
    """Return texts from a command line as a model's inputs: for a model of pairs two texts make one.

    Raises
    ------
    ValueError
        If one is left over.
    """
    if not data.pair_column:
        return texts
    if len(texts) % 2:
        raise ValueError(
            f"predict: expected two texts for each input, for data.pair-column is {data.pair_column!r}, found "
            f"{len(texts)}; write the text and then the second text"
        )
    return list(zip(texts[::2], texts[1::2], strict=True))


def _input(value: Any, expected: str) -> str | list[str]:
    """Return a text, or the words of a list; a number is a text or a word, too."""
    words = value if isinstance(value, list) else [value]
    for word in words:
        if isinstance(word, (list, dict)):
            raise ValueError(f"{expected} {str(word)[:60]}; name a column of texts with --column")
    texts = ["" if is_missing(word) else str(word) for word in words]
    if not "".join(texts).strip():
        raise ValueError(f"{expected} none; write one, or remove the row")
    if not all(text.strip() for text in texts):
        raise ValueError(f"{expected} a list with an empty word; remove the word")
    return texts if isinstance(value, list) else texts[0]


def _cell(value: Any) -> str:
    """Return a text as it is, nothing for null, and another value in JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def check_out(path: Path) -> None:
    """Refuse a file that predictions cannot be written to, before any is made."""
    if path.suffix not in _ENDINGS:
        raise ValueError(f"--out: {path}: expected one of {', '.join(_ENDINGS)}, found {path.suffix or 'no ending'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: {path}: no folder {path.parent}; make it, or name another file")
    if path.is_dir():
        raise ValueError(f"--out: {path}: expected a file, found a folder; name another file")


def write_predictions(
    path: Path, rows: TextRows, predictions: Sequence[str], probabilities: Sequence[Mapping[str, float]] = ()
) -> None:
    """Write the rows, each with its prediction in a column of its own; the ending decides the format.

    Raises
    ------
    ValueError
        For an ending that is no format, or a tab or line feed where the format has no place for one.
    """
    check_out(path)
    added: list[dict[str, Any]] = [{PREDICTION: text} for text in predictions]
    for cells, by_label in zip(added, probabilities, strict=bool(probabilities)):
        cells |= {f"{PROBABILITY}{label}": value for label, value in by_label.items()}
    filled = [finite(row | cells) for row, cells in zip(rows.rows, added, strict=True)]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in filled)
    elif path.suffix == ".txt":
        # A line for each row, so that they can be laid side by side.
        text = "".join(f"{' '.join(prediction.splitlines())}\n" for prediction in predictions)
    else:
        names = [*dict.fromkeys(name for row in rows.rows for name in row if name not in added[0]), *added[0]]
        table = [names] * rows.header + [[_cell(row.get(name)) for name in names] for row in filled]
        for number, row in enumerate(table, 1):
            if path.suffix == ".tsv" and any(mark in cell for cell in row for mark in "\t\n\r"):
                raise ValueError(
                    f"--out: {path}, row {number}: a tab or line feed fits no .tsv; write a .csv or .jsonl"
                )
        write_row = csv_line if path.suffix == ".csv" else lambda row: "\t".join(row) + "\n"
        text = "".join(map(write_row, table))
    durable.write_text(path, text, lasting=False)
