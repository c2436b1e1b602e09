"""Whole weights of many clusters wait for each other on disk: in memory is one tensor at a time.

::

    pieces of a reply ── SinglePulls ──> file of the round ── FedAvg, tensor by tensor ──> average
    decoded updates ──── ReplyIntake ──────────┘

The file has no name: when the process ends, in whatever way, nothing of it is left. It goes when nobody has an array of
its round any more. Updates below :data:`SMALL_BYTES`, such as those of adapters, stay in memory.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from strategies.flower_names import NUMPY_STYPE
from strategies.npy_bytes import MOST_HEAD_BYTES, npy_layout

SMALL_BYTES = 1 << 21
"""Weights of a model, or arrays of a reply, below this many bytes together stay in memory."""


class SpoolError(RuntimeError):
    """The folder of the updates does not take them; the message names it, and says what to do."""


class SpooledArray(Array):
    """An array that reads its bytes from a file whenever they are asked for, and does not change.

    Parameters
    ----------
    dtype, shape, stype : as Flower's
    file : that holds the bytes
    offset, num_bytes : where in it [byte]
    """

    # What is sent says by this which class puts it together.
    __qualname__ = Array.__qualname__

    def __init__(
        self, dtype: str, shape: tuple[int, ...], stype: str, file: _RoundFile, offset: int, num_bytes: int
    ) -> None:
        # Flower's own constructor wants the bytes.
        self.dtype, self.shape, self.stype = dtype, shape, stype
        self.num_bytes = num_bytes
        self._file, self._offset = file, offset

    @property
    def data(self) -> bytes:
        """The bytes of a ``.npy`` file, read anew."""
        return self.head(self.num_bytes)

    @data.setter
    def data(self, data: bytes) -> None:
        raise AttributeError("an array that was put aside does not change; make a new one of its numpy()")

    def head(self, num_bytes: int) -> bytes:
        """Read the first so many bytes, or all."""
        content = bytearray(min(num_bytes, self.num_bytes))
        self._file.read_into(memoryview(content), self._offset)
        return bytes(content)

    def numpy(self) -> NDArray[Any]:
        """Return the values, read anew into memory of the caller's own.

        Raises
        ------
        TypeError
            If the bytes are no ``.npy`` file.
        ValueError
            If the file is of another length than its header says.
        """
        if self.stype != NUMPY_STYPE:
            return super().numpy()
        layout = npy_layout(self.head(MOST_HEAD_BYTES))
        if layout.num_bytes != self.num_bytes:
            raise ValueError(f"expected {layout.num_bytes} bytes, found {self.num_bytes}")
        values = np.empty(math.prod(layout.shape), layout.kind)
        self._file.read_into(values.view(np.uint8).data, self._offset + layout.begin)
        return values.reshape(layout.shape, order=layout.order)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        """Let a copy be one in memory."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


class UpdateSpool:
    """Puts arrays aside, in a file for each round; several threads may.

    Parameters
    ----------
    folder : where; None: the machine's folder for temporary files
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = Lock()
        self._file: _RoundFile | None = None

    def begin_round(self) -> None:
        """Let the arrays from now on have a file of their own."""
        with self._lock:
            self._file = None

    def put_aside(self, array: Array) -> SpooledArray:
        """Write an array to the round's file; one that has been put aside stays where it is.

        Raises
        ------
        SpoolError
            If the disk is full, or there can be no file.
        """
        if isinstance(array, SpooledArray):
            return array
        return self.put_pieces(array, [memoryview(array.data)])

    def put_pieces(self, array: Array, pieces: Sequence[memoryview]) -> SpooledArray:
        """Write an array whose bytes come in pieces, and whose own are ignored; see :meth:`put_aside`."""
        with self._lock:
            if self._file is None:
                self._file = _RoundFile(self._folder)
            file = self._file
        offset = file.append(pieces)
        return SpooledArray(array.dtype, tuple(array.shape), array.stype, file, offset, sum(map(len, pieces)))


class _RoundFile:
    """A file without a name, closed when nobody has it any more."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._lock, self._end = Lock(), 0
        try:
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise self._refused(error, 0) from error
        self._descriptor = file.fileno()
        weakref.finalize(self, file.close)

    def append(self, pieces: Sequence[memoryview]) -> int:
        """Write bytes at the end, and return their offset [byte]."""
        with self._lock:
            begin, self._end = self._end, self._end + sum(map(len, pieces))
            end = self._end
        offset = begin
        for rest in pieces:
            while rest:
                try:
                    num_written = os.pwrite(self._descriptor, rest, offset)
                except OSError as error:
                    raise self._refused(error, end) from error
                offset, rest = offset + num_written, rest[num_written:]
        return begin

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from an offset on."""
        while view:
            num_read = os.preadv(self._descriptor, [view], offset)
            if not num_read:
                raise EOFError(f"the file of the updates ends at byte {offset}")
            offset, view = offset + num_read, view[num_read:]

    def _refused(self, error: OSError, num_bytes: int) -> SpoolError:
        size = f" of {num_bytes} bytes so far" if num_bytes else ""
        return SpoolError(
            f"{self._folder}: the clusters' updates{size} wait here for their average, and cannot be written: "
            f"{error.strerror or error}; make room for the weights of all clusters in this folder, or set runs-dir to "
            "a folder on a larger disk"
        )


def is_in_memory(array: Array) -> bool:
    """Return whether an array has its bytes in memory."""
    return not isinstance(array, SpooledArray)


def data_bytes(array: Array) -> int:
    """Bytes of an array as they are sent, read from no file."""
    return array.num_bytes if isinstance(array, SpooledArray) else len(array.data)


def data_head(array: Array, num_bytes: int) -> bytes:
    """Return the first so many of these bytes, or all."""
    return array.head(num_bytes) if isinstance(array, SpooledArray) else array.data[:num_bytes]


def record_bytes(arrays: ArrayRecord) -> int:
    """Count the bytes of arrays and their names, as ``arrays.count_bytes()``; reads no file."""
    return sum(len(name) + data_bytes(array) for name, array in arrays.items())


def message_bytes(message: Message) -> int:
    """Bytes of a message's arrays, as they are sent."""
    return sum(record_bytes(record) for record in message.content.array_records.values())


def record_of(arrays: Iterable[tuple[str, Array]]) -> ArrayRecord:
    """Return a record of these very arrays, where ``ArrayRecord(dict)`` reads and copies each."""
    record = ArrayRecord()
    for name, array in arrays:
        record[name] = array
    return record
