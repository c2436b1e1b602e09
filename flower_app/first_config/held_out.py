"""Examples set aside: where somebody's text has one file alone, some of it is kept from training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from flower_app.first_config.own_text import OwnText
from flower_app.tasks.tables import csv_line, read_cells
from flower_app.tasks.texts import lines

_SHARE, _MOST = 10, 2000
"""One of so many examples is held out, and no more than so many."""


def set_aside(text: OwnText, folder: Path) -> dict[str, tuple[Path, ...]]:
    """Write training and validation files of a text that has training files alone.

    Parameters
    ----------
    text : from files
    folder : made; it must hold none of these files yet

    Returns
    -------
    Split -> its files.

    Raises
    ------
    ValueError
        If there are too few examples, a file is there already, or it cannot be cut by lines.
    """
    sources = text.files["train"]
    if sources[0].suffix == ".parquet":
        raise ValueError(
            f"{sources[0]}: expected --validation with a parquet file, found none; name a file to score on"
        )
    headers, sides = zip(*(_units(text, path) for path in sources), strict=True)
    number = len(sides[0])
    if number < 2 * _SHARE:
        raise ValueError(f"{sources[0]}: expected at least {2 * _SHARE} examples to set some aside, found {number}")
    order = random.Random(0).sample(range(number), min(_MOST, number // _SHARE))
    held = set(order)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, tuple[Path, ...]] = {}
    for split, chosen in (
        ("train", [i for i in range(number) if i not in held]),
        ("validation", sorted(held)),
    ):
        paths = []
        for source, header, units in zip(sources, headers, sides, strict=True):
            path = folder / f"{split}{source.suffix}"
            if path.exists():
                raise ValueError(f"{path}: is there already; remove it, or name another --out")
            path.write_text(header + "".join(units[i] for i in chosen), encoding="utf-8")
            paths.append(path)
        files[split] = tuple(paths)
    return files


def _units(text: OwnText, path: Path) -> tuple[str, Sequence[str]]:
    """Header of a file, and the text of each of its examples, line feeds included."""
    if path.suffix == ".csv":
        rows = [csv_line(row) for _, row in read_cells(path, "init")]
        return (rows[0], rows[1:]) if text.header else ("", rows)
    all_lines = [f"{line}\n" for line in lines(path, "init")]
    if text.kind == "tagged":
        sentences = [list(group) for filled, group in groupby(all_lines, lambda line: bool(line.strip())) if filled]
        return "", ["".join([*sentence, "\n"]) for sentence in sentences]
    if text.kind != "parallel":
        all_lines = [line for line in all_lines if line.strip(" \r\n")]
    has_header = text.kind == "table" and path.suffix == ".tsv" and text.header
    return (all_lines[0], all_lines[1:]) if has_header else ("", all_lines)
