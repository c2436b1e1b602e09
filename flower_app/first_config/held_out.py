"""Validation examples that are set aside where a user's text has training files alone."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from client_pipeline import durable
from flower_app.first_config.own_text import OwnText
from flower_app.tasks.data.cells import csv_line, read_cells
from flower_app.tasks.data.tables import finite
from flower_app.tasks.data.texts import ending, lines, shards

_SHARE, _MOST = 10, 2000
"""One of so many examples is held out, and no more than so many."""


def set_aside(text: OwnText, folder: Path) -> dict[str, tuple[Path, ...]]:
    """Write training and validation files of a text that has training files alone.

    Cells become a ``.csv`` file, rows of JSON and parquet a ``.jsonl`` file, all of them UTF-8.

    Raises
    ------
    ValueError
        If there are too few examples, or a file is there already.
    """
    sources = text.files["train"]
    headers, sides = zip(*(_units(text, path) for path in sources), strict=True)
    number = len(sides[0])
    if number < 2 * _SHARE:
        raise ValueError(f"{sources[0]}: expected at least {2 * _SHARE} examples to set some aside, found {number}")
    order = random.Random(0).sample(range(number), min(_MOST, number // _SHARE))
    held = set(order)
    endings = [ending(path) for path in sources]
    if text.kind == "table":
        endings = [".csv" if name in (".csv", ".tsv") else ".jsonl" for name in endings]
    if len(set(endings)) < len(endings):
        endings = [f".{side}{name}" for side, name in enumerate(endings)]
    files: dict[str, tuple[Path, ...]] = {
        split: tuple(folder / f"{split}{name}" for name in endings) for split in ("train", "validation")
    }
    for path in (path for paths in files.values() for path in paths):
        if path.exists():
            raise ValueError(f"{path}: is there already; remove it, or name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for split, chosen in (
            ("train", [i for i in range(number) if i not in held]),
            ("validation", sorted(held)),
        ):
            for path, header, units in zip(files[split], headers, sides, strict=True):
                durable.write_text(path, header + "".join(units[i] for i in chosen), lasting=False)
    except BaseException:
        put_back(files, folder)
        raise
    return files


def put_back(files: Mapping[str, Sequence[Path]], folder: Path) -> None:
    """Remove the files that were set aside, and their folder if nothing else is in it."""
    for path in (path for paths in files.values() for path in paths):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _units(text: OwnText, path: Path) -> tuple[str, Sequence[str]]:
    """Header of a file, and the text of each of its examples, line feeds included."""
    if text.kind == "table" and ending(path) in (".csv", ".tsv"):
        tables = [read_cells(file, "init").table(text.header) for file in shards(path, "init")]
        header = tables[0][0]
        # Columns of a shard may stand in an order of its own.
        orders = [[names.index(name) for name in header] for names, _ in tables]
        rows = [
            csv_line([row[i] for i in order])
            for order, (_, cells) in zip(orders, tables, strict=True)
            for _, row in cells.rows
        ]
        return csv_line(header) if text.header else "", rows
    if text.kind == "table":
        columns = text.columns["train"]
        objects = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return "", [f"{json.dumps(finite(each), ensure_ascii=False, default=str)}\n" for each in objects]
    all_lines = [f"{line}\n" for file in shards(path, "init") for line in (*lines(file, "init"), "")]
    if text.kind == "tagged":
        sentences = [list(group) for filled, group in groupby(all_lines, lambda line: bool(line.strip())) if filled]
        return "", ["".join([*sentence, "\n"]) for sentence in sentences if not sentence[0].startswith("-DOCSTART-")]
    if text.kind == "plain":
        return "", [line for line in all_lines if line.strip(" \r\n")]
    return "", [f"{line}\n" for line in lines(path, "init")]
