"""Texts that stay on disk: a corpus may be larger than memory."""

from __future__ import annotations

import os
import tempfile
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


def lines(path: Path, key: str) -> Iterator[str]:
    """Read a text file line by line, as it stands but for the line feeds.

    Only line feeds end a line: other separators of Unicode may stand inside a sentence, and would shift all that
    follows.

    Raises
    ------
    ValueError
        If the file is missing, empty or not UTF-8; the message begins with ``key``.
    """
    if not path.is_file():
        raise ValueError(f"{key}: no file {path}; check data.path and the name")
    is_empty = True
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                is_empty = is_empty and not line.strip()
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 ({error}); convert it") from error
    if is_empty:
        raise ValueError(f"{key}: {path} is empty; expected one sentence a line")


def in_chunks(
    work: Callable[[list[Item]], Iterable[Result]], items: Iterable[Item], size: int = CHUNK
) -> Iterator[Result]:
    """Work on some items at a time, so that neither all of them nor all results are in memory at once."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
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
        return _mapped(file, starts[-1]), np.frombuffer(starts, dtype=np.int64)


def _mapped(file: IO[bytes], count: int) -> npt.NDArray[np.int32]:
    # An empty file cannot be mapped. The mapping outlives the file's name and handle.
    return np.memmap(file, dtype=np.int32, mode="r", shape=(count,)) if count else np.zeros(0, dtype=np.int32)
