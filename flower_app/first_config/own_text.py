"""Somebody's text, read as it is: which files make which split, and what their columns hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_app.config.sources import expanded_path
from flower_app.tasks.corpus import DataConfig
from flower_app.tasks.tables import read_cells, read_hub, read_table_rows
from flower_app.tasks.tagging import read_conll
from flower_app.tasks.texts import lines

TABLE_ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
_TAGGED_ENDINGS = (".conll", ".bio")
_SPLITS = {"train": "train", "validation": "validation|valid|dev|val", "test": "test|eval"}
"""Split -> words in the names of its files."""

Columns = dict[str, list[Any]]
"""Name of each column -> its values; numbers as names where a table has no header."""


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """What was found."""

    kind: str
    """``table``, ``tagged``, ``parallel``, ``plain`` or ``hub``."""
    files: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Split -> its file, or the source and the target file; absolute."""
    columns: dict[str, Columns]
    """Split -> its columns; ``train`` is there."""
    header: bool = True
    """Whether the columns have names."""
    hub_id: str = ""
    hub_splits: dict[str, str] = field(default_factory=dict)
    """Split -> its name in the dataset."""


def read_own_text(sources: Sequence[str], validation: Sequence[str] = (), test: Sequence[str] = ()) -> OwnText:
    """Read what a person names.

    Parameters
    ----------
    sources : a file; the two files of a parallel text; a folder that holds them; or a hub id
    validation, test : files of these splits; empty: those beside the first whose names say so

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the file, what was found and what was expected.
    """
    if len(sources) == 1 and not Path(sources[0]).exists() and not _looks_like_file(sources[0]):
        return _of_hub(sources[0])
    files = _split_files([expanded_path("TEXT", source).absolute() for source in sources])
    for split, names in (("validation", validation), ("test", test)):
        if names:
            files[split] = tuple(expanded_path(f"--{split}", name).absolute() for name in names)
    for split, paths in files.items():
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file for {split}; check the name")
        if len(paths) != len(files["train"]):
            raise ValueError(
                f"{split}: expected {len(files['train'])} files as for training, found {', '.join(map(str, paths))}"
            )
    kind = _kind(files["train"])
    header = _has_header(files["train"][0]) if kind == "table" else True
    columns = {split: _columns(kind, paths, header) for split, paths in files.items()}
    return OwnText(kind=kind, files=files, columns=columns, header=header)


def _looks_like_file(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith((*TABLE_ENDINGS, *_TAGGED_ENDINGS, ".txt"))


def _of_hub(hub_id: str) -> OwnText:
    dataset = read_hub(hub_id, "")
    splits = {
        split: next((name for name in dataset if re.search(words, name, re.IGNORECASE)), "")
        for split, words in _SPLITS.items()
    }
    if not splits["train"]:
        raise ValueError(f"{hub_id}: expected a split train, found {', '.join(map(str, dataset))}")
    if not (splits["validation"] or splits["test"]):
        raise ValueError(
            f"{hub_id}: expected a split validation or test beside train, found {', '.join(map(str, dataset))}; save "
            "one with datasets' train_test_split and name its folder"
        )
    columns = {}
    for split, name in splits.items():
        if name:
            table = dataset[name]
            columns[split] = _flat({column: _named_classes(table, column) for column in table.column_names})
    return OwnText(kind="hub", columns=columns, hub_id=hub_id, hub_splits={s: n for s, n in splits.items() if n})


def _named_classes(table: Any, column: str) -> list[Any]:
    """Values of a column; the names of its classes where it numbers them."""
    values, names = list(table[column]), getattr(table.features[column], "names", None)
    return values if names is None else [names[value] if isinstance(value, int) else value for value in values]


def _split_files(sources: list[Path]) -> dict[str, tuple[Path, ...]]:
    """Which files belong to which split, by their names."""
    if len(sources) > 2:
        raise ValueError(
            f"init: expected a file, the two files of a parallel text, a folder or a hub id, found {len(sources)} names"
        )
    if len(sources) == 1 and sources[0].is_dir():
        found = _by_split(sorted(path for path in sources[0].iterdir() if path.is_file()))
        if "train" not in found:
            names = ", ".join(sorted(path.name for path in sources[0].iterdir())[:10]) or "nothing"
            raise ValueError(
                f"{sources[0]}: expected a file whose name says train, found {names}; name the file itself"
            )
        return found
    files = {"train": tuple(sources)}
    if all(re.search(_SPLITS["train"], source.name, re.IGNORECASE) for source in sources):
        for split in ("validation", "test"):
            beside = tuple(path for source in sources if (path := _beside(source, split)) is not None)
            if len(beside) == len(sources):
                files[split] = beside
    return files


def _by_split(paths: list[Path]) -> dict[str, tuple[Path, ...]]:
    found: dict[str, tuple[Path, ...]] = {}
    for split, words in _SPLITS.items():
        fitting = [path for path in paths if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", path.name, re.IGNORECASE)]
        tables = [path for path in fitting if path.suffix in (*TABLE_ENDINGS, *_TAGGED_ENDINGS)]
        if tables or fitting:
            found[split] = tuple(tables[:1] or fitting[:2])
    return found


def _beside(train: Path, split: str) -> Path | None:
    """The file of another split that lies beside that of training and is called like it."""
    for word in _SPLITS[split].split("|"):
        path = train.with_name(re.sub("train", word, train.name, count=1, flags=re.IGNORECASE))
        if path.is_file():
            return path
    return None


def _kind(paths: tuple[Path, ...]) -> str:
    if len(paths) == 2:
        return "parallel"
    if paths[0].suffix in TABLE_ENDINGS:
        return "table"
    if paths[0].suffix in _TAGGED_ENDINGS:
        return "tagged"
    first = [line for line, _ in zip(lines(paths[0], "init"), range(200), strict=False)]
    words = [re.split(r"\t| ", line.strip()) for line in first if line.strip()]
    tagged = bool(words) and "" in (line.strip() for line in first) and all(len(cells) >= 2 for cells in words)
    return "tagged" if tagged and all(re.fullmatch(r"O|[BI]-\S+", cells[-1]) for cells in words) else "plain"


def _columns(kind: str, paths: tuple[Path, ...], header: bool) -> Columns:
    if kind == "parallel":
        sides = [list(lines(path, "init")) for path in paths]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{paths[0]} has {len(sides[0])} lines, {paths[1]} has {len(sides[1])}; line i of one must translate "
                "line i of the other"
            )
        return {"source": sides[0], "target": sides[1]}
    if kind == "tagged":
        examples = read_conll(paths[0], DataConfig(), "init")
        return {"tokens": list(examples.inputs), "tags": list(examples.labels)}
    if kind == "plain":
        return {"text": [line for line in lines(paths[0], "init") if line.strip()]}
    return _table(paths[0], header)


def _table(path: Path, header: bool) -> Columns:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(path)
        return _flat({name: table[name].to_pylist() for name in table.column_names})
    rows = [row for _, row in read_table_rows(path, "init", header)]
    if not rows:
        raise ValueError(f"{path}: expected rows, found none")
    return _flat({name: [row.get(name) for row in rows] for name in rows[0]})


def _flat(columns: Columns) -> Columns:
    """Make columns of the keys within a column, as ``data.source-column`` names them: ``translation.en``."""
    flat: Columns = {}
    for name, values in columns.items():
        first = next((value for value in values if value is not None), None)
        if isinstance(first, dict):
            inner = [value if isinstance(value, dict) else {} for value in values]
            flat |= {f"{name}.{key}": [value.get(key) for value in inner] for key in first}
        else:
            flat[name] = values
    return flat


def _has_header(path: Path) -> bool:
    """Whether the first row names the columns: it does not if one of its cells is a value further down."""
    if path.suffix not in (".csv", ".tsv"):
        return True
    rows = [cells for _, cells in read_cells(path, "init")[:2000]]
    first, others = rows[0], rows[1:]
    if not others:
        raise ValueError(f"{path}: expected a header and rows, found one row")
    repeated = any(cell in {row[i] for row in others if len(row) > i} for i, cell in enumerate(first))
    return not repeated and not any(cell.strip().replace(".", "").isdigit() for cell in first)
