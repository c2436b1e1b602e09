"""Arrays that came from a client: their headers are checked before their numbers are read.

Flower carries an array as the bytes of a ``.npy`` file beside a type and a shape in words. All three come from the
client, and numpy believes the file: its header alone decides how much memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord

from client_pipeline.link.update_codec import UpdateCodec
from strategies.flower_names import NUMPY_STYPE
from strategies.grid.received_values import MalformedReply, excerpt
from strategies.grid.update_spool import data_bytes, data_head, record_of
from strategies.npy_bytes import MOST_HEAD_BYTES, array_values, npy_layout


class ArrayForm(NamedTuple):
    """Expected types and shape of an array."""

    types: tuple[np.dtype[np.generic], ...]
    """Any of these."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Describe it for error messages."""
        return f"{' or '.join(map(str, self.types))} {list(self.shape)}"


def expected_forms(order_arrays: ArrayRecord, codec: UpdateCodec | None) -> dict[str, ArrayForm]:
    """Form of each array of an answer, by name, in the order of the arrays that were sent.

    Parameters
    ----------
    order_arrays : the order's arrays
    codec : of the updates; None: trained weights come back, float32 or of the type that was sent
    """
    forms: dict[str, ArrayForm] = {}
    for name, array in order_arrays.items():
        shape, sent_type = tuple(array.shape), np.dtype(array.dtype)
        if codec is None:
            types = tuple(dict.fromkeys((np.dtype(np.float32), sent_type)))
            forms[name] = ArrayForm(types, shape)
            continue
        for part, (kind, length) in codec.kinds(math.prod(shape)).items():
            numpy_name = str(kind).removeprefix("torch.")
            forms[f"{name}/{part}"] = ArrayForm((np.dtype(numpy_name),), (length,))
    return forms


def checked_arrays(arrays: ArrayRecord, forms: Mapping[str, ArrayForm]) -> ArrayRecord:
    """Return the arrays in the expected order, each of its expected form; their numbers are not looked at.

    Raises
    ------
    MalformedReply
        Naming the first array that is missing, unknown or of another form.
    """
    if missing := [name for name in forms if name not in arrays]:
        raise MalformedReply(f"update: {missing[0]!r} is missing{_and_more(missing)}")
    if len(arrays) > len(forms):
        unknown = [name for name in arrays if name not in forms]
        raise MalformedReply(f"update: {excerpt(unknown[0])} belongs to no tensor that was sent{_and_more(unknown)}")
    for name, form in forms.items():
        _check_array(name, arrays[name], form)
    return record_of((name, arrays[name]) for name in forms)


def all_finite(array: Array) -> bool:
    """Return whether an array holds neither NaN nor Inf."""
    values = array_values(array)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _check_array(name: str, array: Array, form: ArrayForm) -> None:
    location = f"update of {name}"
    if array.stype != NUMPY_STYPE:
        raise MalformedReply(f"{location}: expected the serialization {NUMPY_STYPE}, found {excerpt(array.stype)}")
    declared = (array.dtype, tuple(array.shape))
    if declared not in [(str(kind), form.shape) for kind in form.types]:
        raise MalformedReply(f"{location}: expected {form}, found {excerpt(array.dtype)} {excerpt(list(array.shape))}")
    head = data_head(array, MOST_HEAD_BYTES)
    try:
        layout = npy_layout(head)
    except ValueError as error:
        raise MalformedReply(f"{location}: {error}, found {excerpt(head[:40])}") from error
    if layout.kind != np.dtype(array.dtype) or layout.shape != form.shape:
        raise MalformedReply(
            f"{location}: expected {form}, its header says {layout.kind} {excerpt(list(layout.shape))}"
        )
    if data_bytes(array) != layout.num_bytes:
        raise MalformedReply(f"{location}: expected {layout.num_bytes} bytes, found {data_bytes(array)}")


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
