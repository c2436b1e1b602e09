"""Reading lines, tables and hub datasets, with errors that name the configuration key and the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLES = (".tsv", ".jsonl", ".parquet")


def read_lines(path: Path, key: str) -> list[str]:
    """Read a text file, one stripped sentence a line.

    Only line feeds end a line: other separators of Unicode may stand inside a sentence, and would shift all that
    follows.

    Raises
    ------
    ValueError
        If the file is missing, empty or not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"{key}: no file {path}; check data.path and the name")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 ({error}); convert it") from error
    if not text.strip():
        raise ValueError(f"{key}: {path} is empty; expected one sentence a line")
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def read_table(path: Path, columns: Mapping[str, str], key: str) -> dict[str, list[Any]]:
    """Read columns of a ``.tsv``, ``.jsonl`` or ``.parquet`` file.

    Parameters
    ----------
    path : the file
    columns : configuration key -> name of the column, as in :func:`columns_of`
    key : configuration key of the file

    Returns
    -------
    Configuration key of each column -> its values.

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
    lines = [(i, line) for i, line in enumerate(_raw_lines(path, key), 1) if line.strip()]
    where = f"{key}: {path}"
    rows = _jsonl(lines, where) if path.suffix == ".jsonl" else _tsv(lines, columns, where)
    if not rows:
        raise ValueError(f"{where} has a header and no row; expected examples")
    return {
        column_key: [_value(row, name, f"{column_key}: {path}, example {i}") for i, row in enumerate(rows)]
        for column_key, name in columns.items()
    }


def columns_of(table: Any, columns: Mapping[str, str], where: str) -> dict[str, list[Any]]:
    """Take columns from a ``datasets`` or ``pyarrow`` table; ``a.b`` is the key ``b`` inside column ``a``.

    Raises
    ------
    ValueError
        If a column is missing or the table has no row; the message lists the columns that are there.
    """
    result = {}
    for key, name in columns.items():
        outer, _, inner = (name, "", "") if name in table.column_names else name.partition(".")
        if outer not in table.column_names:
            raise ValueError(f"{key}: {where} has no column {name!r}, found {', '.join(table.column_names)}")
        values = table[outer]
        values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        if not values:
            raise ValueError(f"{where} has no row; expected examples")
        if inner:
            if not isinstance(values[0], dict) or inner not in values[0]:
                raise ValueError(f"{key}: {where} has no key {inner!r} in column {outer!r}")
            values = [value[inner] for value in values]
        result[key] = values
    return result


def read_hub(hub_id: str, hub_config: str) -> Mapping[str, Any]:
    """Load all splits of a hub dataset, or of a local folder: one saved to disk, or one of data files.

    Raises
    ------
    ValueError
        If it cannot be had; the message gives the reason.
    """
    import datasets

    folder = Path(hub_id)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(hub_id)
        else:
            found = datasets.load_dataset(hub_id, hub_config or None)
    except Exception as error:  # datasets, the hub's client and the network each have their own
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data.hub-id: expected a dataset id or a dataset folder, found {hub_id!r} ({first_line})"
        ) from error
    return found if isinstance(found, dict) else {"train": found}


def _raw_lines(path: Path, key: str) -> list[str]:
    read_lines(path, key)
    return path.read_text(encoding="utf-8-sig").split("\n")


def _jsonl(lines: list[tuple[int, str]], where: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where}, line {number}: expected a JSON object ({error}), found {line[:60]!r}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}, line {number}: expected a JSON object, found {line[:60]!r}")
        rows.append(row)
    return rows


def _tsv(lines: list[tuple[int, str]], columns: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    """Rows as dictionaries: by header, or by index where every wanted column is a number. No quoting."""
    cells = [(number, line.rstrip("\r").split("\t")) for number, line in lines]
    if all(name.isdigit() for name in columns.values()):
        header = [str(i) for i in range(len(cells[0][1]))]
    else:
        header = cells.pop(0)[1]
    for number, row in cells:
        if len(row) != len(header):
            raise ValueError(f"{where}, line {number}: expected {len(header)} columns, found {len(row)}")
    return [dict(zip(header, row, strict=True)) for _, row in cells]


def _value(row: Mapping[str, Any], name: str, where: str) -> Any:
    outer, _, inner = (name, "", "") if name in row else name.partition(".")
    if outer not in row:
        raise ValueError(f"{where}: no column {name!r}, found {', '.join(row)}")
    if not inner:
        return row[outer]
    if not isinstance(row[outer], dict) or inner not in row[outer]:
        raise ValueError(f"{where}: no key {inner!r} in column {outer!r}")
    return row[outer][inner]


def _parquet(path: Path, columns: Mapping[str, str], key: str) -> dict[str, list[Any]]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowInvalid

    try:
        table = parquet.read_table(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{key}: {path} is no parquet file ({error})") from error
    return columns_of(table, columns, f"{key}: {path}")
