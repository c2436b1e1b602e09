"""Texts that stay on disk: a corpus may be larger than memory."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar, overload

import numpy as np
import numpy.typing as npt

Item = TypeVar("Item")
Result = TypeVar("Result")

Indices = Sequence[int] | npt.NDArray[np.int64]
"""Places in a sequence."""

CHUNK = 4096
"""Texts that are worked on at once."""
_BLOCK = 1 << 20
_GZIP = ".gz"
_SAME_FORMAT = {
    ".ndjson": ".jsonl",
    ".json": ".jsonl",
    ".tab": ".tsv",
    ".pq": ".parquet",
    ".iob": ".bio",
    ".iob2": ".bio",
}
_NOT_READ = {
    "save it as CSV": (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"),
    "save it as plain text": (".doc", ".docx", ".odt", ".rtf", ".pdf", ".epub"),
    "write its texts as CSV or JSON lines": (
        *(".xml", ".html", ".htm", ".tmx", ".xlf", ".xliff", ".sgm", ".sgml"),
        *(".yaml", ".yml", ".srt", ".vtt"),
    ),
    "unpack it": (".zip", ".7z", ".rar", ".tar", ".tgz", ".bz2", ".xz", ".zst"),
    "save it as parquet, CSV or JSON lines": (
        *(".arrow", ".feather", ".orc", ".avro", ".h5", ".npy", ".npz", ".pkl", ".pickle", ".pt"),
        *(".db", ".sqlite", ".sqlite3", ".dta", ".rds"),
    ),
}
"""Remedy -> endings of formats that are not read."""
_CONTAINERS = {
    b"PK\x03\x04": "a spreadsheet or an archive",
    b"\xd0\xcf\x11\xe0": "a spreadsheet or a document",
    b"PAR1": "a parquet file",
}
MARK = "\ufeff"
"""Unicode's byte-order mark; where files were joined it stands before a line."""
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order mark -> encoding; that of UTF-32 begins like that of UTF-16, and is looked for first."""


class Texts(Sequence[str]):
    """Texts in a file without a name, which ends with this object; in memory are their places alone, 8 byte each.

    They are read one by one, not mapped, so that a pass over all of them leaves nothing in the process's memory. The
    file lies in the system's folder of temporary files (``TMPDIR``).

    Parameters
    ----------
    texts : written one by one
    chosen : which of ``texts``, where these lie in such a file already: it is shared, and nothing is copied
    """

    _file: IO[bytes]
    _ends: npt.NDArray[np.int64]

    def __init__(self, texts: Iterable[str], indices: Indices | None = None) -> None:
        self._chosen: npt.NDArray[np.int64] | None = None
        if isinstance(texts, Texts) and indices is not None:
            places = np.asarray(indices, dtype=np.int64)
            self._file, self._ends = texts._file, texts._ends
            self._chosen = places if texts._chosen is None else texts._chosen[places]
            return
        ends = array("q", [0])
        self._file = tempfile.TemporaryFile(buffering=_BLOCK)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self._file.write(data)
            ends.append(ends[-1] + len(data))
        self._file.flush()
        self._ends = np.frombuffer(ends, dtype=np.int64)

    def take(self, indices: Indices) -> Texts:
        """Return some of the texts, in this order; none is copied."""
        return Texts(self, indices)

    def __len__(self) -> int:
        return len(self._ends) - 1 if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if self._chosen is not None:
            place = int(self._chosen[place])
        start, end = int(self._ends[place]), int(self._ends[place + 1])
        return os.pread(self._file.fileno(), end - start, start).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(text == theirs for text, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Texts({self[:3]}{'...' if len(self) > 3 else ''}, {len(self)} in all)"


def subset(texts: Sequence[str], indices: Indices) -> Sequence[str]:
    """Return some of the texts, without a copy where they are on disk."""
    return texts.take(indices) if isinstance(texts, Texts) else [texts[i] for i in indices]


def ending(path: Path) -> str:
    """Return the format that a file's name ends in: ``.jsonl`` for ``.JSON`` and for ``.ndjson.gz``."""
    suffix = path.suffix.lower()
    if suffix == _GZIP:
        suffix = Path(path.stem).suffix.lower()
    return _SAME_FORMAT.get(suffix, suffix)


def blank_separated(text: str) -> list[str]:
    r"""Cut a text into words at blanks, tabs and line ends of ASCII alone: a no-break space belongs to its word.

    >>> blank_separated("10\u00a0000  B-QTY")
    ['10\xa0000', 'B-QTY']
    """
    return [word for word in re.split(r"[ \t\r\n]+", text) if word]


def matching_files(path: Path) -> list[Path]:
    """Return the files of a name: itself, or in their order all that its ``*`` match."""
    first = next((i for i, part in enumerate(path.parts) if "*" in part), len(path.parts))
    matches = [path] if first == len(path.parts) else Path(*path.parts[:first]).glob("/".join(path.parts[first:]))
    return sorted(file for file in matches if file.is_file()) or [path] * path.is_file()


def shards(path: Path, key: str) -> list[Path]:
    """Return the files of a name, as :func:`matching_files`.

    Raises
    ------
    ValueError
        If none is there, or one of those that ``-00000-of-00003`` counts is missing.
    """
    files = matching_files(path)
    if not files:
        raise ValueError(f"{key}: no file {path}; check data.path and the name")
    counted = re.search(r"-of-(\d+)", files[0].name)
    if "*" in str(path) and counted and len(files) != int(counted[1]):
        raise ValueError(f"{key}: {path}: expected {int(counted[1])} shards, found {len(files)}; copy the others, too")
    return files


def check_format(path: Path, key: str) -> None:
    """Raise ``ValueError`` for a file whose ending names a format that is not read here."""
    if remedy := next((remedy for remedy, endings in _NOT_READ.items() if ending(path) in endings), ""):
        raise ValueError(f"{key}: {path}: files {ending(path)} are not read; {remedy}")


def open_text(path: Path, key: str, newline: str) -> IO[str]:
    """Open a text file: UTF-8, or what its byte-order mark says; packed by gzip or not.

    Raises
    ------
    ValueError
        If the file is missing, or of a format that holds no text; the message begins with ``key``.
    """
    check_format(path, key)
    if not path.is_file():
        raise ValueError(f"{key}: no file {path}; check data.path and the name")
    with path.open("rb") as packed:
        is_packed = packed.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_packed else path.open("rb") as file:
        head = file.read(1024)
    encoding = next((name for mark, name in _ENCODINGS.items() if head.startswith(mark)), "utf-8")
    if kind := next((kind for mark, kind in _CONTAINERS.items() if head.startswith(mark)), ""):
        raise ValueError(f"{key}: {path} is {kind} by its first bytes; save it as CSV, or give it its own ending")
    if encoding == "utf-8" and b"\0" in head:
        raise ValueError(
            f"{key}: {path} is not UTF-8: it has zero bytes; convert it, from UTF-16 say: "
            f"iconv -f UTF-16LE -t UTF-8 {path.name}"
        )
    return (
        gzip.open(path, "rt", encoding=encoding, newline=newline)
        if is_packed
        else path.open(encoding=encoding, newline=newline)
    )


def lines(path: Path, key: str) -> Iterator[str]:
    """Read a text file line by line, without the ends of the lines; of several shards one after the other.

    Line feeds end a line, carriage returns in a file without them: other separators of Unicode may stand inside a
    sentence, and would shift all that follows. The byte-order marks of joined files are left out.

    Raises
    ------
    ValueError
        If the file is missing, empty, damaged or in an encoding without a mark; the message begins with ``key``.
    """
    is_empty = True
    for file in shards(path, key):
        try:
            with open_text(file, key, "\n") as opened:
                for number, line in enumerate(opened):
                    is_empty = is_empty and not line.strip()
                    has_line_feeds = number or line.endswith("\n")
                    for each in [line] if has_line_feeds else line.removesuffix("\r").split("\r"):
                        yield each.rstrip("\r\n").removeprefix(MARK)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{key}: {file} is not UTF-8 ({error}); convert it, from Latin-1 say: "
                f"iconv -f WINDOWS-1252 -t UTF-8 {file.name}"
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{key}: {file} is damaged ({error}); pack it again") from error
    if is_empty:
        raise ValueError(f"{key}: {path} is empty; expected one sentence a line")


def in_chunks(work: Callable[[list[Item]], Iterable[Result]], items: Iterable[Item]) -> Iterator[Result]:
    """Work on some items at a time, so that neither all of them nor all results are in memory at once."""
    rest = iter(items)
    while chunk := list(islice(rest, CHUNK)):
        yield from work(chunk)


def stored_integers(rows: Iterable[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Write rows of integers one after the other into a file without a name, and map it into memory.

    Returns
    -------
    All integers, mapped: the system reads what is used, and takes the memory back when it is short of it. And the start
    of each row, with the end of the last.
    """
    starts = array("q", [0])
    with tempfile.TemporaryFile(buffering=_BLOCK) as file:
        for row in rows:
            file.write(array("i", row).tobytes())
            starts.append(starts[-1] + len(row))
        file.flush()
        # An empty file cannot be mapped. The mapping outlives the file's name and handle.
        count = starts[-1]
        mapped = np.memmap(file, dtype=np.int32, mode="r", shape=(count,)) if count else np.zeros(0, dtype=np.int32)
        return mapped, np.frombuffer(starts, dtype=np.int64)
