"""Reading tables and hub datasets, with errors that name the configuration key and the file."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client_pipeline.partition.hub_ids import check_source
from client_pipeline.partition.hub_reach import offline_remedy
from flower_app.tasks.texts import lines

logger = logging.getLogger("flwr.collapipe.text")

TABLES = (".tsv", ".csv", ".jsonl", ".parquet")
_LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit of 131,072 is less than a long document."""
_LOST = "\ufffd"
"""What Unicode puts in place of a character that cannot be read."""


@dataclass(frozen=True)
class Table:
    """Columns of a file or dataset, and where each row stands there."""

    columns: dict[str, list[Any]]
    """Configuration key of the column -> its values."""
    name: str
    """The file, or the dataset and its split."""
    numbers: Sequence[int]
    """Line of each row, from 1; or its number, from 0, where there are no lines."""
    unit: str = "line"
    """``line`` or ``row``."""
    class_names: dict[str, list[str]] = field(default_factory=dict)
    """Configuration key -> names of the classes, of the columns of a dataset that number its classes."""

    def place(self, row: int) -> str:
        """Say where a row stands."""
        return f"{self.name}, {self.unit} {self.numbers[row]}"

    def texts(self, key: str) -> Iterator[str]:
        """Yield the values of a column as stripped texts; a missing one is empty.

        Raises
        ------
        ValueError
            For a list or a dictionary, with its place.
        """
        for row, value in enumerate(self.columns[key]):
            yield "" if value is None else _plain(value, f"{key}: {self.place(row)}: expected a text")

    def class_name(self, key: str, value: Any, place: str) -> str:
        """Return a label as a name: a dataset may number its classes.

        Raises
        ------
        ValueError
            For a number without a name, an empty label, one with a character that is lost, a list or a dictionary.
        """
        names = self.class_names.get(key)
        if names is None:
            name = "" if value is None else _plain(value, f"{key}: {place}: expected a label")
        elif isinstance(value, int) and 0 <= value < len(names):
            name = names[value]
        else:
            raise ValueError(f"{key}: {place}: expected the number of one of {len(names)} classes, found {value!r}")
        if not name:
            raise ValueError(f"{key}: {place}: the label is empty")
        if _LOST in name:
            # Two labels that differ in what they have lost would be one class.
            raise ValueError(
                f"{key}: {place}: expected a whole label, found {name!r} with a lost character (U+FFFD); correct it"
            )
        return name


def _plain(value: Any, expected: str) -> str:
    """Return a text, or a number as one; what is nested has no text of its own."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"{expected}, found {str(value)[:60]}; name a column of texts")
    return str(value).strip()


def read_table(path: Path, columns: Mapping[str, str], key: str) -> Table:
    """Read columns of a ``.tsv``, ``.csv``, ``.jsonl`` or ``.parquet`` file.

    Parameters
    ----------
    path : the file
    columns : configuration key -> name of the column, as in :func:`columns_of`
    key : configuration key of the file

    Raises
    ------
    ValueError
        If the file is missing, empty, of another kind or damaged, or has no such column.
    """
    if path.suffix not in TABLES:
        raise ValueError(
            f"{key}: {path} alone must be a table ({', '.join(TABLES)}); for parallel text files set "
            f"{key.replace('-source', '-target')} too"
        )
    if path.suffix == ".parquet":
        if not path.is_file():
            raise ValueError(f"{key}: no file {path}; check data.path and the name")
        return _parquet(path, columns, key)
    rows = read_table_rows(path, key, has_header=not all(name.isdigit() for name in columns.values()))
    if not rows:
        raise ValueError(f"{key}: {path} has a header and no row; expected examples")
    texts_by_column = {
        column_key: [_value(row, name, f"{column_key}: {path}, line {number}") for number, row in rows]
        for column_key, name in columns.items()
    }
    return Table(texts_by_column, str(path), [number for number, _ in rows])


def read_table_rows(path: Path, key: str, has_header: bool = True) -> list[tuple[int, dict[str, Any]]]:
    """Read every row of a ``.tsv``, ``.csv`` or ``.jsonl`` file.

    Parameters
    ----------
    path : the file
    key : what errors begin with: the key or option that names the file
    has_header : whether the first row of a ``.tsv`` or ``.csv`` file has the names of the columns

    Returns
    -------
    The line of each row, from 1, and its values by column; by the column's number where there is no header.

    Raises
    ------
    ValueError
        Naming the line, what was found and what was expected.
    """
    location = f"{key}: {path}"
    if path.suffix == ".jsonl":
        return _jsonl([(i, line) for i, line in enumerate(lines(path, key), 1) if line.strip()], location)
    cells = read_cells(path, key)
    header = cells.pop(0)[1] if has_header else [str(i) for i in range(len(cells[0][1]))]
    if twice := [name for i, name in enumerate(header) if name and name in header[:i]]:
        raise ValueError(
            f"{location}: expected a name of its own for each column, found {twice[0]!r} twice; rename one"
        )
    for number, row in cells:
        if len(row) != len(header):
            raise ValueError(f"{location}, line {number}: expected {len(header)} columns, found {len(row)}")
    return [(number, dict(zip(header, row, strict=True))) for number, row in cells]


def read_cells(path: Path, key: str) -> list[tuple[int, list[str]]]:
    """Read the cells of each row of a ``.tsv`` or ``.csv`` file, a header's too, with the line on which it ends.

    Raises
    ------
    ValueError
        As :func:`read_table_rows`.
    """
    if path.suffix == ".csv":
        return _csv(path, key)
    # No quoting. A blank line is no row; tabs alone are a row of empty cells.
    found_lines = [(i, line) for i, line in enumerate(lines(path, key), 1) if line.strip(" \r")]
    return [(number, line.rstrip("\r").split("\t")) for number, line in found_lines]


def columns_of(table: Any, columns: Mapping[str, str], key: str, name: str) -> Table:
    """Take columns from a ``datasets`` or ``pyarrow`` table; ``a.b`` is the key ``b`` inside column ``a``.

    Raises
    ------
    ValueError
        If a column is missing or the table has no row; the message lists the columns that are there.
    """
    result, class_names, location = {}, {}, f"{key}: {name}"
    for column_key, column in columns.items():
        outer, _, inner = (column, "", "") if column in table.column_names else column.partition(".")
        if outer not in table.column_names:
            raise ValueError(
                f"{column_key}: {location} has no column {column!r}, found {', '.join(table.column_names)}"
            )
        values = table[outer]
        values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        if not values:
            raise ValueError(f"{location} has no row; expected examples")
        if inner:
            first = next((value for value in values if value is not None), {inner: None})
            if not isinstance(first, dict) or inner not in first:
                raise ValueError(f"{column_key}: {location} has no key {inner!r} in column {outer!r}")
            values = [None if value is None else value.get(inner) for value in values]
        elif names := _class_names(table, outer):
            class_names[column_key] = names
        result[column_key] = values
    return Table(result, name, range(len(table)), "row", class_names)


def _class_names(table: Any, column: str) -> list[str] | None:
    """Names that a dataset gives to the numbers of a column of classes, or of sequences of classes."""
    feature = getattr(table, "features", {}).get(column)
    feature = getattr(feature, "feature", feature)
    names = getattr(feature, "names", None)
    return None if names is None else [str(name) for name in names]


def read_hub(hub_id: str, hub_config: str) -> Mapping[str, Any]:
    """Load all splits of a hub dataset, or of a local folder: one saved to disk, or one of data files.

    Raises
    ------
    ValueError
        If it cannot be had; the message gives the reason.
    """
    check_source(hub_id, "data.hub-id")
    import datasets

    folder = Path(hub_id)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            dataset = datasets.load_from_disk(hub_id)
        else:
            dataset = datasets.load_dataset(hub_id, hub_config or None)
    except Exception as error:  # datasets, the hub's client and the network each have their own
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data.hub-id: expected a dataset id or a dataset folder, found {hub_id!r} ({first_line})"
            f"{'' if folder.is_dir() else offline_remedy()}"
        ) from error
    return dataset if isinstance(dataset, dict) else {"train": dataset}


def _jsonl(lines: list[tuple[int, str]], location: str) -> list[tuple[int, dict[str, Any]]]:
    rows, num_halved = [], 0
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{location}, line {number}: expected a JSON object ({error}), found {line[:60]!r}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{location}, line {number}: expected a JSON object, found {line[:60]!r}")
        whole = _whole(row) if "\\u" in line else row
        num_halved += whole != row
        rows.append((number, whole))
    if num_halved:
        logger.warning("%s: %d of %d rows have half a character; it is read as U+FFFD", location, num_halved, len(rows))
    return rows


def _whole(value: Any) -> Any:
    """Put U+FFFD for each half of a character: texts that were cut by their length end in such, and are no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {_whole(key): _whole(each) for key, each in value.items()} if isinstance(value, dict) else value


def csv_line(cells: Sequence[Any]) -> str:
    """Write a row of a ``.csv`` file, line feed included, so that it is read as it was."""
    line = io.StringIO()
    # Python quotes a cell with the mark of a line's end; within a cell a carriage return is one, too.
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def _csv(path: Path, key: str) -> list[tuple[int, list[str]]]:
    """Cells of each row, and the line on which the row ends."""
    # For its errors: a cell may hold line feeds.
    for _ in lines(path, key):
        pass
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            return [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            location = f"{key}: {path}, line {reader.line_num}"
            raise ValueError(f"{location}: expected comma-separated cells ({error})") from error


def _value(row: Mapping[str, Any], name: str, location: str) -> Any:
    outer, _, inner = (name, "", "") if name in row else name.partition(".")
    if outer not in row:
        raise ValueError(f"{location}: no column {name!r}, found {', '.join(row)}")
    if not inner or row[outer] is None:
        return row[outer]
    if not isinstance(row[outer], dict) or inner not in row[outer]:
        raise ValueError(f"{location}: no key {inner!r} in column {outer!r}")
    return row[outer][inner]


def _parquet(path: Path, columns: Mapping[str, str], key: str) -> Table:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowInvalid

    try:
        table = parquet.read_table(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{key}: {path} is no parquet file ({error})") from error
    return columns_of(table, columns, key, str(path))
