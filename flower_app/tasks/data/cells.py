"""Cells of ``.csv`` and ``.tsv`` files, as spreadsheets and scripts write them."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flower_app.tasks.data.texts import MARK, ending, lines, open_text

_LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit of 131,072 is less than a long document."""
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_SAMPLE, _LEAST_SHARE = 500, 0.9
"""Rows that a delimiter is found by, and the share of them that must have as many cells as the first."""
_CHANCE = 9
"""Rows that may be of one width by chance."""


@dataclass(frozen=True)
class Cells:
    """Rows of a file as they stand."""

    rows: list[tuple[int, list[str]]]
    """Line on which each row ends, from 1, and its cells; a header is one of them."""
    decisions: tuple[str, ...] = ()
    """Whatever the file's ending does not say: a sentence each."""

    def table(self, has_header: bool) -> tuple[list[str], Cells]:
        """Return the names of the columns, and the rows below.

        Without a header the names are numbers from 0; a column that lacks a name has that of pandas. A header that
        stands again further down (two files joined), and a first row that numbers the columns (``DataFrame.to_csv``
        without names), are no examples.
        """
        first, below = self.rows[0][1], self.rows[1:]
        numbers = [str(i) for i in range(len(first))]
        if has_header:
            kept = [(number, row) for number, row in below if row != first]
            if again := [number for number, row in below if row == first]:
                decision = f"rows that repeat the header are left out: {len(again)}, the first in line {again[0]}"
                return _named(first), Cells(kept, (*self.decisions, decision))
            return _named(first), Cells(below, self.decisions)
        if len(first) > 1 and first in (numbers, ["", *numbers[:-1]]):
            decision = "the first row numbers the columns, and is no example"
            return numbers, Cells(below, (*self.decisions, decision))
        return numbers, self


def read_cells(path: Path, key: str) -> Cells:
    """Read the cells of a ``.csv`` or ``.tsv`` file.

    A file is cut at commas or tabs, as its ending says, unless its rows are of one width at another delimiter only. The
    cells of a ``.tsv`` file are quoted where every row is whole that way.

    Raises
    ------
    ValueError
        Naming file and line, what was found and what was expected.
    """
    # For its errors: a cell may hold line feeds.
    for _ in lines(path, key):
        pass
    csv.field_size_limit(_LONGEST_CELL)
    with open_text(path, key, "") as file:
        pieces = [piece.removeprefix(MARK) for piece in file]
    usual = "\t" if ending(path) == ".tsv" else ","
    first = pieces[0].rstrip("\r\n")
    skipped = first.lower().startswith("sep=") and len(first) == 5
    delimiter = first[4] if skipped else _delimiter(pieces, usual, f"{key}: {path}")
    decisions = () if delimiter == usual else (f"cells are separated by {_DELIMITERS.get(delimiter, delimiter)}",)
    if delimiter == "\t":
        # A blank line is no row; tabs alone are a row of empty cells.
        plain = [(i, line.split("\t")) for i, line in enumerate(lines(path, key), 1) if line.strip(" ")]
        plain = plain[skipped:]
        quoted = _quoted_rows(pieces[skipped:], plain)
        if quoted is None:
            return Cells(plain, decisions)
        quoted = [(skipped + number, row) for number, row in quoted]
        return Cells(quoted, (*decisions, "cells in quotes are read without them"))
    reader = csv.reader(pieces[skipped:], delimiter=delimiter, strict=True)
    try:
        return Cells([(skipped + reader.line_num, row) for row in reader if row], decisions)
    except csv.Error as error:
        separated = "comma-separated cells" if delimiter == "," else f"cells separated by {_DELIMITERS[delimiter]}"
        raise ValueError(f"{key}: {path}, line {skipped + reader.line_num}: expected {separated} ({error})") from error


def csv_line(cells: Sequence[Any]) -> str:
    """Write a row of a ``.csv`` file, line feed included, so that it is read as it was."""
    line = io.StringIO()
    # Python quotes a cell with the mark of a line's end; within a cell a carriage return is one, too.
    # A cell with another delimiter is quoted, for the delimiter is looked for.
    is_quoted = any(mark in str(cell) for cell in cells for mark in ";\t|")
    csv.writer(line, lineterminator="\r\n", quoting=csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL).writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def _named(header: Sequence[str]) -> list[str]:
    """Return the names of columns, each with one of its own where the header has none."""
    names = list(header)
    for i, name in enumerate(header):
        if not name.strip():
            names[i] = f"Unnamed: {i}"
            # Of a table that was saved again with its index.
            while names[i] in header:
                names[i] += ".1"
    return names


def _delimiter(pieces: Sequence[str], usual: str, location: str) -> str:
    """Return the delimiter at which most rows are as wide as the first.

    Of equals it is one that no blank follows, as it follows a comma within a text, and then the usual one.

    Raises
    ------
    ValueError
        If the rows below the first are of one width at a delimiter, and the first is of another at each.
    """
    shares, widths = {}, {}
    for delimiter in (usual, *_DELIMITERS):
        rows = [row for row in islice(csv.reader(pieces, delimiter=delimiter), _SAMPLE) if row]
        if not rows:
            continue
        share = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        is_punctuation = all(any(cell.startswith(" ") for cell in row[1:]) for row in rows)
        shares[delimiter] = (share, not is_punctuation) if len(rows[0]) > 1 and share >= _LEAST_SHARE else (0, False)
        width, count = Counter(map(len, rows[1:])).most_common(1)[0] if rows[1:] else (1, 0)
        if len(rows) > _CHANCE and width > 1 and count >= _LEAST_SHARE * len(rows[1:]):
            widths[delimiter] = (width, len(rows[0]))
    best = max(shares, key=lambda delimiter: shares[delimiter], default=usual)
    if shares.get(best, (0,))[0]:
        return best
    if widths:
        delimiter, (width, first) = next(iter(widths.items()))
        raise ValueError(
            f"{location}, line 1: expected {width} columns with {_DELIMITERS[delimiter]} between as in the rows below, "
            f"found {first}; write the first row as these, or the texts in quotes"
        )
    return usual


def _quoted_rows(pieces: Sequence[str], plain: Sequence[tuple[int, list[str]]]) -> list[tuple[int, list[str]]] | None:
    """Read cut and quoted cells of a ``.tsv`` file; None where quotes are characters like others.

    They are where a row is not whole with them, or where rows that are whole without them would be joined.
    """
    if not any(cell.startswith('"') for _, row in plain for cell in row):
        return None
    reader = csv.reader(pieces, delimiter="\t", strict=True)
    try:
        quoted = [(reader.line_num, row) for row in reader if row]
    except csv.Error:
        return None
    is_whole, is_whole_plain = (len({len(row) for _, row in rows}) == 1 for rows in (quoted, plain))
    return quoted if is_whole and (len(quoted) == len(plain) or not is_whole_plain) else None
