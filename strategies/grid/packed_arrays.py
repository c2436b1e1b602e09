"""Small arrays travel together: a message carries one array instead of hundreds.

Flower sends each array of a message as objects of its own, and each object is a request and several statements of the
SuperLink's database, on its way to the node and back. The biases and norms of a Transformer, or the adapters of a
language model, are hundreds of arrays of a few kilobytes: the requests cost more than the bytes.

What is packed are whole arrays as Flower serializes them, one after the other; who unpacks has the very arrays that
were sent, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from flwr.app import Array, ArrayRecord

from strategies.grid.update_spool import data_bytes

PACK = "collapipe/packed"
"""Name of the array that holds others: of no tensor."""
_STYPE = "collapipe.packed"
_SMALL_BYTES = 1 << 18
"""Arrays below this are packed: others are worth their requests."""
_PACK_BYTES = 1 << 26
"""Most that is packed of a record, and unpacked in memory; the arrays that are left go by themselves."""
_LENGTH_BYTES = 8
_INDEX_BYTES = 1 << 20
"""Longest index that is written or read, of some ten thousand arrays: a short entry takes tens of times its bytes."""


class UnfitPack(ValueError):
    """A pack cannot be taken apart; the message gives the reason."""


def pack_arrays(arrays: ArrayRecord) -> ArrayRecord:
    """Put small arrays into one; a record that has no two of them, or far too many, is returned as it is."""
    small = _small_arrays(arrays)
    content = _pack(arrays, small)
    if len(small) < 2 or content is None:
        return arrays
    record = ArrayRecord()
    record[PACK] = Array("uint8", (len(content),), _STYPE, content)
    for name, array in arrays.items():
        if name not in small:
            record[name] = array
    return record


def pack_all(arrays: ArrayRecord, most_bytes: int) -> bytes | None:
    """Put all arrays of a record into one; None if they are not all small, or together not."""
    if sum(map(data_bytes, arrays.values())) > most_bytes:
        return None
    small = _small_arrays(arrays)
    return _pack(arrays, small) if len(small) == len(arrays) else None


def unpack_all(content: bytes) -> ArrayRecord:
    """Return the record that :func:`pack_all` was given.

    Raises
    ------
    UnfitPack
        If the pack is not what it says it is.
    """
    record = ArrayRecord()
    record[PACK] = Array("uint8", (len(content),), _STYPE, content)
    return unpack_arrays(record)


def _small_arrays(arrays: ArrayRecord) -> dict[str, Array]:
    small, left = dict[str, Array](), _PACK_BYTES
    for name, array in arrays.items():
        if data_bytes(array) < min(_SMALL_BYTES, left):
            small[name] = array
            left -= data_bytes(array)
    return small


def _pack(arrays: ArrayRecord, small: Mapping[str, Array]) -> bytes | None:
    """Index of a record and the bytes of its small arrays; None if there can be no such pack."""
    index = [
        [name, array.dtype, list(array.shape), array.stype, data_bytes(array)] if name in small else [name]
        for name, array in arrays.items()
    ]
    header = json.dumps(index).encode()
    if PACK in arrays or len(header) > _INDEX_BYTES:
        return None
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "big"), header, *(array.data for array in small.values())])


def unpack_arrays(arrays: ArrayRecord) -> ArrayRecord:
    """Return the record that :func:`pack_arrays` was given; one without a pack is returned as it is.

    Whatever a pack says, it takes its bytes twice, of which there is a limit, and tens of times those of its index.

    Raises
    ------
    UnfitPack
        If the pack is not what it says it is, or does not fit the arrays beside it.
    """
    if PACK not in arrays:
        return arrays
    # Before they are read: they may wait on disk.
    num_bytes, most_bytes = data_bytes(arrays[PACK]), _LENGTH_BYTES + _INDEX_BYTES + _PACK_BYTES
    if num_bytes > most_bytes:
        raise UnfitPack(f"{PACK}: at most {most_bytes} bytes are packed, found {num_bytes}")
    content = memoryview(arrays[PACK].data)
    begin = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "big")
    if not _LENGTH_BYTES <= begin <= min(len(content), _LENGTH_BYTES + _INDEX_BYTES):
        raise UnfitPack(f"{PACK}: an index of {begin - _LENGTH_BYTES} bytes, of {len(content)} in all")
    beside = {name for name in arrays if name != PACK}
    record = ArrayRecord()
    for entry in _index(bytes(content[_LENGTH_BYTES:begin])):
        match entry:
            case [str(name)] if name in beside:
                record[name] = arrays[name]
                beside.remove(name)
            case [str(name), str(dtype), list(shape), str(stype), int(size)] if (
                0 <= size <= len(content) - begin and name not in arrays and name not in record
            ):
                record[name] = Array(dtype, tuple(shape), stype, bytes(content[begin : begin + size]))
                begin += size
            case _:
                raise UnfitPack(f"{PACK}: an entry of its index fits no array: {json.dumps(entry)[:100]}")
    if beside or begin != len(content):
        raise UnfitPack(f"{PACK}: its index leaves {len(content) - begin} bytes and {len(beside)} arrays over")
    return record


def _index(text: bytes) -> Iterable[object]:
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnfitPack(f"{PACK}: its index is no JSON: {str(error)[:100]}") from None
    if not isinstance(index, list):
        raise UnfitPack(f"{PACK}: expected a list as its index, found {type(index).__name__}")
    return index
