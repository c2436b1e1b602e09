"""The bytes of ``.npy`` files, in which Flower's arrays travel: their headers, read without an evaluation.

numpy has Python's own parser read a header. In Python 3.11 that one counts its depth for all threads at once, and two
that parse at the same time can each fail with a ``SystemError``: rarely, and then a cluster loses its round by it.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from strategies.flower_names import NUMPY_STYPE

MOST_HEAD_BYTES = 1036
"""Longest head of a file that is taken, with its magic string; numpy's own have 128 bytes."""

_MAGIC = re.compile(rb"\x93NUMPY(?:\x01\x00(..)|\x02\x00(....))", re.DOTALL)
_HEADER = re.compile(rb"\{'descr': '([<|][a-z]\d{1,2})', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n")


class NpyLayout(NamedTuple):
    """Layout of the numbers behind a ``.npy`` file's head."""

    kind: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    begin: int
    """Offset of the numbers [byte]."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.begin + math.prod(self.shape) * self.kind.itemsize


def npy_layout(content: bytes | memoryview) -> NpyLayout:
    """Read the head of a ``.npy`` file of plain numbers.

    Parameters
    ----------
    content : the file, or its first :data:`MOST_HEAD_BYTES` bytes

    Raises
    ------
    ValueError
        If that is no such head; of the content the message says nothing.
    """
    head = bytes(content[:MOST_HEAD_BYTES])
    magic = _MAGIC.match(head)
    begin = magic.end() + int.from_bytes(magic[1] or magic[2], "little") if magic else 0
    header = _HEADER.fullmatch(head[magic.end() : begin]) if magic and begin <= len(head) else None
    if header is None:
        raise ValueError("expected the header of a .npy file")
    try:
        kind = np.dtype(header[1].decode())
        shape = tuple(int(number) for number in header[3].replace(b" ", b"").split(b",") if number)
    except (TypeError, ValueError) as error:
        raise ValueError("the header of the .npy file has no meaning") from error
    return NpyLayout(kind, shape, "F" if header[2] == b"True" else "C", begin)


def array_values(array: Array) -> NDArray[Any]:
    """Return an array's values in memory of the caller's own, as ``array.numpy()`` does.

    Raises
    ------
    TypeError
        If it is serialized in another way than numpy's.
    ValueError
        If its bytes are no ``.npy`` file, or one of another length than its header says.
    """
    # One that reads its bytes from a file has a way of its own.
    return values_in_place(array).copy(order="K") if type(array) is Array else array.numpy()


def values_in_place(array: Array) -> NDArray[Any]:
    """Return an array's values on its own bytes, to be read alone; errors as :func:`array_values`."""
    if array.stype != NUMPY_STYPE:
        raise TypeError(f"expected an array serialized as {NUMPY_STYPE}, found {array.stype}")
    content = array.data
    layout = npy_layout(content)
    if len(content) != layout.num_bytes:
        raise ValueError(f"expected a .npy file of {layout.num_bytes} bytes, found {len(content)}")
    return np.ndarray(layout.shape, layout.kind, buffer=content, offset=layout.begin, order=layout.order)
