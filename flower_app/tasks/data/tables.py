"""Reading tables and hub datasets, with errors that name the configuration key and the file."""

from __future__ import annotations

import json
import logging
import math
import re
import unicodedata
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from client_pipeline.documents import json_value
from client_pipeline.near_names import did_you_mean
from client_pipeline.weights.hub_ids import check_source, offline_remedy
from flower_app.tasks.data.cells import read_cells
from flower_app.tasks.data.texts import check_format, ending, lines, shards

logger = logging.getLogger("flwr.collapipe.text")

TABLES = (".tsv", ".csv", ".jsonl", ".parquet")
LOST = "\ufffd"
"""Unicode's replacement for a character that cannot be read."""
_UNSEEN = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe0e\ufe0f\ufeff]")
"""Characters without a picture, such as the soft hyphen and the zero-width space."""


@dataclass(frozen=True)
class Table:
    """Columns of a file or dataset, and where each row stands there."""

    columns: dict[str, list[Any]]
    """Configuration key of the column -> its values."""
    place: Callable[[int], str]
    """Place of a row: the file and its line, or the dataset and its row."""
    class_names: dict[str, list[str]] = field(default_factory=dict)
    """Configuration key -> names of the classes, of the columns of a dataset that number its classes."""

    def texts(self, key: str, stripped: bool = True) -> Iterator[str]:
        """Yield the values of a column as texts; a missing one is empty.

        Raises
        ------
        ValueError
            For a list or a dictionary, with its place.
        """
        for row, value in enumerate(self.columns[key]):
            text = "" if is_missing(value) else _plain(value, f"{key}: {self.place(row)}: expected a text", "texts")
            yield text.strip() if stripped else text

    def labels(self, key: str, listed: Sequence[str] = ()) -> list[str]:
        """Return a column of labels as names, one for each value: see :func:`one_spelling`."""
        if listed and not set(listed) & set(declared := self.class_names.get(key, listed)) and declared:
            # The list has the numbers of the classes.
            return replace(self, class_names={}).labels(key, listed)
        names = [self.class_name(key, value, self.place(row)) for row, value in enumerate(self.columns[key])]
        if key in self.class_names:
            return names
        for row, name in enumerate(names):
            if is_missing_label(name) and name not in listed:
                raise ValueError(
                    f"{key}: {self.place(row)}: the label is missing, found {name!r}; remove the row, or list the name "
                    "in data.labels"
                )
        spelling = one_spelling(names, listed)
        return [spelling.get(name, name) for name in names]

    def class_name(self, key: str, value: Any, place: str) -> str:
        """Return a label as a name: a dataset may number its classes.

        Raises
        ------
        ValueError
            For a number without a name, an empty label, one with a character that is lost, a list or a dictionary.
        """
        names = self.class_names.get(key)
        if is_missing(value) and value is not None:
            raise ValueError(f"{key}: {place}: the label is missing ({value}); write one, or remove the row")
        if names is None:
            expected = f"{key}: {place}: expected a label"
            name = "" if value is None else _plain(value, expected, "labels, one a row").strip()
        elif isinstance(value, int) and 0 <= value < len(names):
            name = names[value]
        else:
            remedy = "; a test set that hides its labels cannot be scored: leave it out" if value == -1 else ""
            raise ValueError(
                f"{key}: {place}: expected the number of one of {len(names)} classes, found {value!r}{remedy}"
            )
        if not spelled_value(name):
            raise ValueError(f"{key}: {place}: the label is empty")
        if LOST in name:
            # Two labels that differ in what they have lost would be one class.
            raise ValueError(
                f"{key}: {place}: expected a whole label, found {name!r} with a lost character (U+FFFD); correct it"
            )
        return name


def is_missing(value: Any) -> bool:
    """Return whether a value is not there: null, or a number that is none, NaN or infinity."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def is_missing_label(value: Any) -> bool:
    """Return whether a label is not there: as :func:`is_missing`, nothing, or what pandas writes for that."""
    return is_missing(value) or (isinstance(value, str) and value.strip().lower() in ("", "nan", "inf", "-inf"))


def finite(value: Any) -> Any:
    """Put null for each number that JSON does not have, NaN and infinity, in a list or an object, too."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else None if is_missing(value) else value


def one_spelling(names: Iterable[str], listed: Sequence[str] = ()) -> dict[str, str]:
    """Map labels that spell one value in several ways, such as 1, 1.0 and True, to one spelling.

    A spelling that is listed wins, then the shortest. What has one spelling alone stays as it is.

    >>> sorted(one_spelling(["1", "1.0", "True", "0.0", "1.5", "a"]).items())
    [('1', '1'), ('1.0', '1'), ('True', '1')]
    """
    spellings: dict[str, set[str]] = defaultdict(set)
    for name in {*names, *listed}:
        spellings[spelled_value(name)].add(name)
    chosen: dict[str, str] = {}
    for same in spellings.values():
        best = min(same, key=lambda name: (name not in listed, len(name), name))
        chosen |= {name: name if name in listed else best for name in same if len(same) > 1}
    return chosen


def spelled_value(name: str) -> str:
    """Return what a label spells: a whole number without sign and fraction, or a text.

    A text's accents are one character (Unicode's NFC) and its words have one blank between; characters that nobody
    sees are left out.

    >>> spelled_value("+7.0"), spelled_value("True"), spelled_value("so  good")
    ('7', '1', 'so good')
    """
    if number := re.fullmatch(r"(0|[+-]?[1-9]\d*)(\.0*)?", name, re.ASCII):
        return number[1].removeprefix("+")
    text = _UNSEEN.sub("", unicodedata.normalize("NFC", name))
    return {"true": "1", "false": "0"}.get(text.lower()) or " ".join(text.split())


def folded_label(name: str) -> str:
    """Return what a label says, whatever its spelling and the case of its letters."""
    return spelled_value(name.strip()).casefold()


def _plain(value: Any, expected: str, column: str) -> str:
    """Return a text, or a number as one; what is nested has no text of its own."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"{expected}, found {str(value)[:60]}; name a column of {column}")
    return str(value)


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
    check_format(path, key)
    if ending(path) not in TABLES:
        raise ValueError(
            f"{key}: {path} alone must be a table ({', '.join(TABLES)}); for parallel text files set "
            f"{key.replace('-source', '-target')} too"
        )
    read = _parquet if ending(path) == ".parquet" else _rows
    return _joined([read(file, columns, key) for file in shards(path, key)])


def read_columns(path: Path, key: str, has_header: bool) -> Table:
    """Read every column of a table, by its own name; a row without one has None there."""

    def read(file: Path) -> Table:
        if ending(path) == ".parquet":
            return _parquet(file, {}, key)
        rows = read_table_rows(file, key, has_header)
        if not rows:
            raise ValueError(f"{key}: {file}: expected rows, found none")
        names = dict.fromkeys(name for _, row in rows for name in row)
        columns = {name: [row.get(name) for _, row in rows] for name in names}
        return Table(columns, lambda row: f"{file}, line {rows[row][0]}")

    files = shards(path, key)
    tables = [read(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        # A row of JSON may lack what it has no value for.
        if table.columns.keys() != tables[0].columns.keys() and ending(path) != ".jsonl":
            raise ValueError(
                f"{key}: {file}: expected the columns {', '.join(tables[0].columns)} of the other shards, found "
                f"{', '.join(table.columns)}; write the same in each"
            )
    return _joined(tables)


def _joined(tables: Sequence[Table]) -> Table:
    """Return the shards of a table as one."""
    if len(tables) == 1:
        return tables[0]
    sizes = [len(next(iter(table.columns.values()))) for table in tables]
    ends = list(accumulate(sizes))
    for key, names in tables[0].class_names.items():
        if other := next((table for table in tables if table.class_names.get(key) != names), None):
            raise ValueError(
                f"{key}: {other.place(0)}: expected the classes {names} of the other shards; name one file"
            )

    def place(row: int) -> str:
        shard = bisect_right(ends, row)
        return tables[shard].place(row - (ends[shard - 1] if shard else 0))

    columns: dict[str, list[Any]] = {key: [] for table in tables for key in table.columns}
    for key, values in columns.items():
        for table, size in zip(tables, sizes, strict=True):
            values += table.columns.get(key, [None] * size)
    return Table(columns, place, tables[0].class_names)


def _rows(path: Path, columns: Mapping[str, str], key: str) -> Table:
    rows = read_table_rows(path, key, has_header=not all(name.isdigit() for name in columns.values()))
    if not rows:
        raise ValueError(f"{key}: {path} has a header and no row; expected examples")
    texts_by_column = {
        column_key: [_value(row, name, f"{column_key}: {path}, line {number}") for number, row in rows]
        for column_key, name in columns.items()
    }
    return Table(texts_by_column, lambda row: f"{path}, line {rows[row][0]}")


def read_table_rows(path: Path, key: str, has_header: bool = True) -> list[tuple[int, dict[str, Any]]]:
    """Read every row of a ``.tsv``, ``.csv`` or ``.jsonl`` file.

    Parameters
    ----------
    path : the file
    key : what errors begin with: the key or option that names the file
    has_header : whether the first row of a ``.tsv`` or ``.csv`` file has the names of the columns

    Returns
    -------
    The line of each row, from 1, and its values by column; by the column's number where there is no header. The rows of
    a JSON list are counted from 1.

    Raises
    ------
    ValueError
        Naming the line, what was found and what was expected.
    """
    location = f"{key}: {path}"
    if ending(path) == ".jsonl":
        return _json_rows(path, key)
    cells = read_cells(path, key)
    header, below = cells.table(has_header)
    if twice := [name for i, name in enumerate(header) if name and name in header[:i]]:
        raise ValueError(
            f"{location}: expected a name of its own for each column, found {twice[0]!r} twice; rename one"
        )
    for decision in below.decisions[len(cells.decisions) :]:
        logger.warning("%s: %s", location, decision)
    for number, row in below.rows:
        if len(row) != len(header):
            raise ValueError(f"{location}, line {number}: expected {len(header)} columns, found {len(row)}")
    return [(number, dict(zip(header, row, strict=True))) for number, row in below.rows]


def _json_rows(path: Path, key: str) -> list[tuple[int, dict[str, Any]]]:
    """Read the rows of a ``.jsonl`` or ``.json`` file: objects, each with its line or its place in a list."""
    location, num_halved = f"{key}: {path}", 0
    rows: list[tuple[int, dict[str, Any]]] = []
    all_lines = list(lines(path, key))
    numbered_lines = [(i, line) for i, line in enumerate(all_lines, 1) if line.strip()]
    has_escapes = any("\\u" in line for _, line in numbered_lines)
    if _is_document(path, [line for _, line in numbered_lines]):
        values = _document(location, "\n".join(all_lines))
    else:
        values = _line_values(location, numbered_lines)
    for number, row in values:
        if not isinstance(row, dict):
            raise ValueError(f"{location}, line {number}: expected a JSON object, found {json.dumps(row)[:60]!r}")
        whole = _whole(row) if has_escapes else row
        num_halved += whole != row
        rows.append((number, whole))
    if num_halved:
        logger.warning("%s: %d of %d rows have half a character; it is read as U+FFFD", location, num_halved, len(rows))
    return rows


def _is_document(path: Path, filled_lines: Sequence[str]) -> bool:
    """Return whether a JSON file is one value over all of its lines, not an object a line."""
    first = filled_lines[0].strip()
    if first[0] == "[" or first == "{":
        return True
    if ".json" not in Path(path.name.lower()).suffixes:
        return False
    try:
        return isinstance(json_value(first), dict) and len(filled_lines) == 1
    except ValueError:
        return True


def _document(location: str, text: str) -> Iterator[tuple[int, Any]]:
    try:
        document = json_value(text)
    except ValueError as error:
        raise ValueError(f"{location}: expected a JSON list of objects, or an object a line ({error})") from error
    if not isinstance(document, list):
        keys = ", ".join(list(document)[:6]) if isinstance(document, dict) else repr(document)[:60]
        if '"paragraphs"' in text and '"qas"' in text:
            raise ValueError(
                f"{location}: question answering data (SQuAD, one object with {keys}): CollaPipe has no task for it yet"
            )
        raise ValueError(
            f"{location}: expected a JSON list of objects, or an object a line, found one object with {keys}; write "
            'its rows as a list, from pandas by to_json(orient="records")'
        )
    return iter(enumerate(document, 1))


def _line_values(location: str, numbered_lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    for number, line in numbered_lines:
        try:
            yield number, json_value(line)
        except ValueError as error:
            raise ValueError(
                f"{location}, line {number}: expected a JSON object ({error}), found {line[:60]!r}"
            ) from error


def _whole(value: Any) -> Any:
    """Put U+FFFD for each half of a character: texts that were cut by their length end in such, and are no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {_whole(key): _whole(each) for key, each in value.items()} if isinstance(value, dict) else value


def columns_of(table: Any, columns: Mapping[str, str], key: str, name: str) -> Table:
    """Take columns from a ``datasets`` or ``pyarrow`` table; ``a.b`` is the key ``b`` inside column ``a``.

    Parameters
    ----------
    table : to read
    columns : configuration key -> name of the column; empty: all columns, by their own names
    key, name : of the table, for messages

    Raises
    ------
    ValueError
        If a column is missing or the table has no row; the message lists the columns that are there.
    """
    result, class_names, features, location = {}, {}, _features(table), f"{key}: {name}"
    for column_key, column in (columns or {column: column for column in table.column_names}).items():
        outer, _, inner = (column, "", "") if column in table.column_names else column.partition(".")
        if outer not in table.column_names:
            raise ValueError(
                f"{column_key}: {location} has no column {column!r}, found {', '.join(table.column_names)}"
                f"{did_you_mean(column, table.column_names)}"
            )
        values = table[outer]
        values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        values = [_decoded(value, f"{column_key}: {location}, row {i}") for i, value in enumerate(values)]
        if not values:
            raise ValueError(f"{location} has no row; expected examples")
        if inner:
            first = next((value for value in values if value is not None), {inner: None})
            if not isinstance(first, dict) or inner not in first:
                raise ValueError(f"{column_key}: {location} has no key {inner!r} in column {outer!r}")
            values = [None if value is None else value.get(inner) for value in values]
        else:
            # Of a column of classes, or of sequences of classes.
            feature = features.get(outer)
            names = getattr(getattr(feature, "feature", feature), "names", None)
            if names:
                class_names[column_key] = [str(each) for each in names]
        result[column_key] = values
    return Table(result, lambda row: f"{name}, row {row}", class_names)


def _decoded(value: Any, place: str) -> Any:
    """Return the text of bytes: some writers of parquet know no texts."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: expected a text, found bytes that are not UTF-8; name another column") from error


def _features(table: Any) -> Mapping[str, Any]:
    """Return what is known of the columns of a dataset, or of a parquet file that ``datasets`` wrote."""
    if hasattr(table, "features"):
        return table.features
    if b"huggingface" not in (table.schema.metadata or {}):
        return {}
    import datasets

    return datasets.Features.from_arrow_schema(table.schema)


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


def _value(row: Mapping[str, Any], name: str, location: str) -> Any:
    outer, _, inner = (name, "", "") if name in row else name.partition(".")
    if outer not in row:
        raise ValueError(
            f"{location}: no column {name!r}, found {', '.join(row)}{did_you_mean(name, row)}; name another, or write "
            "it there"
        )
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
