"""A message whose records are small travels as one record, and its small arrays as one array at least.

Flower sends each record of a message, each array and each of an array's chunks as an object of its own, with a request
for each at either end and at the SuperLink. The order of a round has six of them and its answer seven when all arrays
are in one; as parcels they have three each: the message, its content and the one record in it.

The server packs what it sends; a node packs its answer if its order came packed, so that stock servers meet what they
know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from strategies.grid.packed_arrays import PACK, UnfitPack, pack_all, pack_arrays, unpack_all, unpack_arrays
from strategies.grid.update_spool import SMALL_BYTES

PARCEL = "collapipe/parcel"
"""Name of the record that holds all others, by their names."""
_MOST_RECORDS = 16
"""Each takes some kilobytes, whatever it holds."""
_ARRAYS, _CONFIG, _METRICS = b"a", b"c", b"m"
"""First byte of each record: its kind."""


class _Packs:
    """Packed array records of many messages, each made once; most messages of a round have the same."""

    def __init__(self) -> None:
        self._whole: dict[int, bytes | None] = {}
        self._parts: dict[int, ArrayRecord] = {}

    def content(self, record: ArrayRecord | ConfigRecord | MetricRecord) -> bytes | None:
        """Return the bytes of a record; None if it has too many."""
        if not isinstance(record, ArrayRecord):
            return (_CONFIG if isinstance(record, ConfigRecord) else _METRICS) + record.deflate()
        if id(record) not in self._whole:
            pack = pack_all(record, SMALL_BYTES)
            self._whole[id(record)] = None if pack is None else _ARRAYS + pack
        return self._whole[id(record)]

    def arrays(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record with the small arrays in one."""
        if id(record) not in self._parts:
            self._parts[id(record)] = pack_arrays(record)
        return self._parts[id(record)]


def packed_messages(messages: Iterable[Message]) -> list[Message]:
    """Pack messages: the results share the metadata, in which Flower notes the ids of what it sends."""
    packs = _Packs()

    def of(message: Message) -> Message:
        if message.has_error():
            return message
        content = _parcel(message.content, packs)
        if content is None:
            content = RecordDict()
            for name, record in message.content.items():
                content[name] = packs.arrays(record) if isinstance(record, ArrayRecord) else record
        packed = copy.copy(message)
        packed.content = content
        return packed

    return [of(message) for message in messages]


def _parcel(content: RecordDict, packs: _Packs) -> RecordDict | None:
    """All records in one; None if they are not small, or many."""
    if len(content) > _MOST_RECORDS:
        return None
    parcel = ConfigRecord()
    left = SMALL_BYTES
    for name, record in content.items():
        packed = packs.content(record)
        if packed is None or len(packed) > left:
            return None
        left -= len(packed)
        parcel[name] = packed
    return RecordDict({PARCEL: parcel})


def unpack_message(message: Message) -> bool:
    """Unpack all records of a message, in place; returns whether they were packed.

    Raises
    ------
    UnfitPack
        If they are not what they say they are.
    """
    if message.has_error():
        return False
    if PARCEL in message.content:
        records = _unpacked(message.content)
        del message.content[PARCEL]
        for name, record in records.items():
            message.content[name] = record
        return True
    packs = {name: record for name, record in message.content.array_records.items() if PACK in record}
    for name, pack in packs.items():
        message.content[name] = unpack_arrays(pack)
    return bool(packs)


def _unpacked(content: RecordDict) -> dict[str, ArrayRecord | ConfigRecord | MetricRecord]:
    parcel = content[PARCEL]
    if not isinstance(parcel, ConfigRecord) or len(content) > 1:
        raise UnfitPack(f"{PARCEL}: expected this ConfigRecord alone, found {type(parcel).__name__} of {len(content)}")
    if len(parcel) > _MOST_RECORDS:
        raise UnfitPack(f"{PARCEL}: at most {_MOST_RECORDS} records are sent in one, found {len(parcel)}")
    contents: dict[str, bytes] = {}
    for name, packed in parcel.items():
        if not isinstance(packed, bytes):
            raise UnfitPack(f"{PARCEL}: expected bytes of each record, found {type(packed).__name__}")
        contents[name] = packed
    if (num_bytes := sum(map(len, contents.values()))) > SMALL_BYTES:
        raise UnfitPack(f"{PARCEL}: at most {SMALL_BYTES} bytes are sent in one, found {num_bytes}")
    return {name: _record(packed[:1], packed[1:]) for name, packed in contents.items()}


def _record(kind: bytes, content: bytes) -> ArrayRecord | ConfigRecord | MetricRecord:
    try:
        if kind == _ARRAYS:
            return unpack_all(content)
        if kind == _CONFIG:
            return ConfigRecord.inflate(content)
        if kind == _METRICS:
            return MetricRecord.inflate(content)
    except (DecodeError, ValueError, TypeError, LookupError) as error:
        raise UnfitPack(f"{PARCEL}: a record cannot be read: {str(error)[:100]}") from None
    raise UnfitPack(f"{PARCEL}: a record of an unknown kind: {kind!r}")
