"""A user's text as it is: the files of each split, and their columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_app.config.sources import expanded_path
from flower_app.tasks.data.cells import read_cells
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.tables import TABLES, Table, columns_of, is_missing, read_columns, read_hub
from flower_app.tasks.data.texts import ending, lines, matching_files, shards
from flower_app.tasks.tagging import CONLL, read_conll

_TAGGED = tuple(name for name in CONLL if name != ".txt")
_SPLITS = {"train": "train", "validation": "validation|valid|dev|val", "test": "test|eval"}
"""Split -> words in the names of its files."""
_TWO_CLASSES = (("pos", "neg"), ("positive", "negative"), ("spam", "ham"), ("true", "fake"), ("real", "fake"))
"""Names of two files that are no translation."""
_SHOWN = 10
"""Files that a line names."""
_NAMELESS = re.compile(r"\s*|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
_CHANCE = 9
"""Lines of a text that may be alike by chance."""

Columns = dict[str, list[Any]]
"""Name of each column -> its values; numbers as names where a table has no header."""


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """Files and columns of a user's text."""

    kind: str
    """``table``, ``tagged``, ``parallel``, ``plain`` or ``hub``."""
    files: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Split -> its file, or the source and the target file; absolute."""
    columns: dict[str, Columns]
    """Split -> its columns; ``train`` is there."""
    header: bool = True
    """The columns have names."""
    hub_id: str = ""
    hub_splits: dict[str, str] = field(default_factory=dict)
    """Split -> its name in the dataset."""
    notes: tuple[str, ...] = ()
    """Decisions on how the files are read: a line each."""

    def unlabelled(self, labels: str) -> list[str]:
        """Return the splits beside training whose labels are not there: a competition's test set, say.

        They have no such column, or none but empty values, or -1, which is no label of training.
        """
        hidden = {"", "-1", "[]"} - set(map(str, self.columns["train"].get(labels, [])))
        return [
            split
            for split, columns in self.columns.items()
            if split != "train" and all(is_missing(value) or str(value) in hidden for value in columns.get(labels, []))
        ]


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
    if len(sources) == 1:
        folder = expanded_path("TEXT", sources[0]).absolute()
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _of_hub(str(folder))
        is_name = sources[0].startswith((".", "/", "~")) or "*" in sources[0]
        if not (folder.exists() or is_name or ending(Path(sources[0])) in (*TABLES, *CONLL)):
            return _of_hub(sources[0])
    files = _split_files([expanded_path("TEXT", source).absolute() for source in sources])
    for split, names in (("validation", validation), ("test", test)):
        if names:
            files[split] = tuple(expanded_path(f"--{split}", name).absolute() for name in names)
    for split, paths in files.items():
        for path in paths:
            if not matching_files(path):
                raise FileNotFoundError(f"{path}: no such file for {split}; check the name")
        if len(paths) != len(files["train"]):
            raise ValueError(
                f"{split}: expected {len(files['train'])} files as for training, found {', '.join(map(str, paths))}"
            )
    kind = _kind(files["train"])
    header = _has_header(shards(files["train"][0], "init")[0]) if kind == "table" else True
    columns = {split: _columns(kind, paths, header) for split, paths in files.items()}
    notes = [note for split, paths in files.items() for path in paths for note in _notes(split, path, kind, header)]
    notes += _drop_nameless(columns, str(files["train"][0]))
    if len(sources) == 1:
        notes += _not_read(expanded_path("TEXT", sources[0]).absolute(), files)
    return OwnText(kind=kind, files=files, columns=columns, header=header, notes=tuple(notes))


def _notes(split: str, path: Path, kind: str, header: bool) -> list[str]:
    """Decisions on how a file was read."""
    files = shards(path, "init")
    notes = [f"{split}: {len(files)} files {path.name} are read as one"] if len(files) > 1 else []
    if kind == "table" and ending(path) in (".csv", ".tsv"):
        decisions = dict.fromkeys(
            note for file in files for note in read_cells(file, "init").table(header)[1].decisions
        )
        notes += [f"{path.name}: {decision}" for decision in decisions]
        if not header:
            notes.append(f"{path.name}: no row names the columns, which are numbered from 0")
    return notes


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
            columns[split] = _named(columns_of(dataset[name], {}, "init", f"{hub_id}, split {name}"))
    notes = tuple(_drop_nameless(columns, hub_id))
    named_splits = {split: name for split, name in splits.items() if name}
    return OwnText(kind="hub", columns=columns, hub_id=hub_id, hub_splits=named_splits, notes=notes)


def _named(table: Table) -> Columns:
    """Columns of a table, with the names of classes that it numbers."""
    return _flat(
        {
            column: [_class_of(value, table.class_names.get(column, [])) for value in values]
            for column, values in table.columns.items()
        }
    )


def _drop_nameless(columns: dict[str, Columns], source: str) -> list[str]:
    """Leave out columns without a name, such as pandas' index of the rows; returns the line that says so.

    Raises
    ------
    ValueError
        If no column of training has a name.
    """
    nameless = [name for name in columns["train"] if _NAMELESS.fullmatch(name)]
    if len(nameless) == len(columns["train"]):
        raise ValueError(
            f"{source}: expected columns with names, found {', '.join(nameless)}; name them in the first row"
        )
    for split in columns.values():
        for name in [name for name in split if _NAMELESS.fullmatch(name)]:
            del split[name]
    return [f"columns without a name are not used: {', '.join(nameless)}"] if nameless else []


def _class_of(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list) and names:
        return [_class_of(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def _split_files(sources: list[Path]) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split, by their names."""
    if len(sources) == 1 and sources[0].is_dir():
        return _of_folder(sources[0])
    tables = [path for path in sources if ending(path) in (*TABLES, *_TAGGED)]
    if len(sources) == 1 and re.search(r"-\d+-of-\d+", sources[0].name):
        sources = [_pattern(sources[0])]
    elif len(sources) > 1 and tables:
        sources = list(_one_source(tables, sources[0].parent)) if len(tables) == len(sources) else []
    if len(sources) not in (1, 2):
        raise ValueError(
            "init: expected a file, its shards, the two files of a parallel text, a folder or a hub id, found "
            f"{len(sources) or 'other'} names; name the training file alone, others by --validation and --test"
        )
    files = {"train": tuple(sources)}
    if all(re.search(_SPLITS["train"], source.name, re.IGNORECASE) for source in sources):
        for split in ("validation", "test"):
            beside = tuple(path for source in sources if (path := _beside(source, split)) is not None)
            if len(beside) == len(sources):
                files[split] = beside
    return files


def _of_folder(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Splits of the files in a folder; of those in its sub-folders, where it has no training file itself."""
    for pattern in ("*", "*/**/*"):
        by_split: dict[str, list[Path]] = {}
        for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
            by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
        if "train" in by_split:
            return {split: _one_source(by_split[split], folder) for split in _SPLITS if split in by_split}
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise ValueError(f"{folder}: expected a file whose name says train, found {names}; name the file itself")


def _not_read(folder: Path, files: dict[str, tuple[Path, ...]]) -> list[str]:
    """Line that names the other files of a folder; none where all are read, or a file was named."""
    read = {file for paths in files.values() for path in paths for file in matching_files(path)}
    pattern = "*" if any(path.parent == folder for path in read) else "**/*"
    others = [path.relative_to(folder) for path in sorted(folder.glob(pattern)) if path.is_file() and path not in read]
    names = [path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts)]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return [f"files of the folder that are not read: {shown}"] if names else []


def _split_of(path: Path) -> str:
    """Return the split that a file's name says, or else its folders; empty: none, or a hidden file."""
    for part in reversed(path.parts):
        for split, words in _SPLITS.items():
            if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", part, re.IGNORECASE):
                return split if not any(part.startswith(".") for part in path.parts) else ""
    return ""


def _one_source(paths: list[Path], folder: Path) -> tuple[Path, ...]:
    """Return the file of one split, the pattern of its shards, or the two files of a parallel text."""
    tables = [path for path in paths if ending(path) in (*TABLES, *_TAGGED)]
    patterns: dict[Path, list[Path]] = {}
    for path in tables or paths:
        patterns.setdefault(_pattern(path), []).append(path)
    whole_folders = {path.with_name(f"*{path.suffix}") for path in tables if not _split_of(Path(path.name))}
    if len(patterns) > 1 and len(whole_folders) == 1:
        patterns = {whole_folders.pop(): tables}
    sides = {(path.parent, path.suffix) for path in patterns}
    is_parallel = not tables and len(patterns) == 2 == len(sides) and len({parent for parent, _ in sides}) == 1
    chosen = tuple(group[0] if len(group) == 1 else pattern for pattern, group in patterns.items())
    if len(patterns) > 1 + is_parallel or any(
        len(group) > 1 and matching_files(pattern) != group for pattern, group in patterns.items()
    ):
        names = ", ".join([path.relative_to(folder).as_posix() for path in tables or paths][:6])
        raise ValueError(
            f"{folder}: expected one file, or its shards, found {names}; name the training file itself, others by "
            "--validation and --test"
        )
    return chosen


def _pattern(path: Path) -> Path:
    """Return the name of a file and its shards: ``train-*-of-*.parquet``."""
    return path.with_name(re.sub(r"(?<=-)[0-9a-f]{16}|\d+", "*", path.stem) + path.suffix)


def _beside(train: Path, split: str) -> Path | None:
    """The file of another split that lies beside that of training and is called like it."""
    for word in _SPLITS[split].split("|"):
        path = train.with_name(re.sub("train", word, train.name, count=1, flags=re.IGNORECASE))
        if matching_files(path):
            return path
    return None


def _kind(paths: tuple[Path, ...]) -> str:
    if len(paths) == 2:
        sides = [set(re.split("[^a-z]+", path.name.lower())) for path in paths]
        for one, other in _TWO_CLASSES:
            if any(one in first and other in second for first, second in (sides, sides[::-1])):
                raise ValueError(
                    f"{paths[0]}, {paths[1].name}: found texts of two classes by their names, {one} and {other}, "
                    "expected a text and its translation; write both into one .csv with the columns text and label"
                )
        return "parallel"
    path = paths[0]
    if ending(path) in TABLES:
        return "table"
    if ending(path) in _TAGGED:
        return "tagged"
    first = [line for line, _ in zip(lines(path, "init"), range(200), strict=False)]
    filled = [line.strip() for line in first if line.strip()]
    words = [re.split(r"[\t ]+", line) for line in filled if not line.startswith("#")]
    tagged = len(filled) < len(first) and all(len(cells) >= 2 for cells in words)
    if tagged and words and all(re.fullmatch(r"O|[BIELMSUW]-\S+", cells[-1]) for cells in words):
        if ending(path) in CONLL:
            return "tagged"
        raise ValueError(f"{path}: found a word and its tag on each line; expected the ending .conll, rename it")
    if tagged and len(words) > _CHANCE and len({len(cells) for cells in words}) == 1:
        raise ValueError(f"{path}: found as many words in each line, as if tagged, expected a text a line; rename it")
    _check_plain(path, filled)
    return "plain"


def _check_plain(path: Path, filled: list[str]) -> None:
    """Refuse the lines of a table, which are no texts."""
    if re.match(r'[\[{]\s*($|["{\[])', filled[0]):
        raise ValueError(f"{path}: found JSON, expected a text a line; rename it to {path.stem}.jsonl")
    if re.match(r"<(\?xml|!doctype|html)\b", filled[0], re.IGNORECASE):
        raise ValueError(f"{path}: found XML or HTML, expected a text a line; write its texts as CSV or JSON lines")
    if all(line.startswith("__label__") for line in filled):
        raise ValueError(f"{path}: found labels before the texts (fastText); write them as a .csv with two columns")
    marks = [re.match(r"([+-]?\d|[A-Z]+:\w+)\s", line) for line in filled]
    if len(filled) > _CHANCE and all(marks) and 1 < len({mark[1] for mark in marks if mark}) < len(filled) / 5:
        raise ValueError(f"{path}: found a label before each text; write them as a .csv with two columns")
    for mark, name in (("\t", "tabs"), (";", "semicolons"), ("|", "vertical bars"), (",", "commas")):
        counts = {line.count(mark) for line in filled}
        if len(filled) > (2 if name == "tabs" else _CHANCE) and len(counts) == 1 and counts != {0}:
            raise ValueError(
                f"{path}: found as many {name} in each line, as in a table, expected a text a line; rename it to "
                f"{path.stem}.{'tsv' if name == 'tabs' else 'csv'}"
            )


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
    return _named(read_columns(paths[0], "init", header))


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
    """Tell whether the first row names the columns: it does not if one of its cells is a value further down."""
    if ending(path) not in (".csv", ".tsv"):
        return True
    rows = [cells for _, cells in read_cells(path, "init").rows[:2000]]
    first, others = rows[0], [cells for cells in rows[1:] if cells != rows[0]]
    if not others:
        raise ValueError(f"{path}: expected a header and rows, found one row")
    repeated = any(cell in {row[i] for row in others if len(row) > i} for i, cell in enumerate(first))
    return not repeated and not any(cell.strip().replace(".", "").isdigit() for cell in first)
