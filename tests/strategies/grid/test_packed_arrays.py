"""Small arrays in one: who unpacks has what was sent, and a pack that lies is refused without its memory."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.grid import packed_arrays
from strategies.grid.packed_arrays import PACK, UnfitPack, pack_arrays, unpack_arrays
from strategies.grid.update_spool import UpdateSpool

pytestmark = pytest.mark.usefixtures("flower_process")


def record_with(**values):
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


MANY = {
    "b": np.arange(3, dtype=np.float32),
    "large": np.zeros(70_000, np.float32),
    "a": np.ones((2, 3), np.float16),
    "number": np.float64(3.5),
    "empty": np.zeros((0, 4), np.int64),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def as_pack(index, content=b"", beside=()):
    header = index if isinstance(index, bytes) else json.dumps(index).encode()
    data = len(header).to_bytes(8, "big") + header + content
    record = ArrayRecord()
    record[PACK] = Array("uint8", (len(data),), "collapipe.packed", data)
    for name in beside:
        record[name] = Array(np.zeros(1))
    return record


def test_what_is_unpacked_is_what_was_packed_in_its_order():
    record = record_with(**MANY)
    parcel = pack_arrays(record)
    assert list(parcel) == [PACK, "large"] and parcel["large"] is record["large"]
    unpacked = unpack_arrays(parcel)
    assert list(unpacked) == list(MANY)
    for name, array in record.items():
        other = unpacked[name]
        assert (other.dtype, other.shape, other.stype, other.data) == (
            array.dtype,
            array.shape,
            array.stype,
            array.data,
        )


def test_a_pack_beyond_the_limit_is_refused_before_it_is_read_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_arrays, "_PACK_BYTES", 1000)
    record = as_pack([[*SMALL, 2 << 20]], bytes(2 << 20))
    record[PACK] = UpdateSpool(tmp_path).put_aside(record[PACK])
    monkeypatch.setattr(type(record[PACK]), "head", lambda *_: pytest.fail("it is read"))
    with pytest.raises(UnfitPack, match="bytes are packed, found"):
        unpack_arrays(record)


SMALL = ["a", "float32", [1], "numpy.ndarray"]


@pytest.mark.parametrize(
    "record",
    {
        "no index": as_pack(b""),
        "an index that is no list": as_pack({"a": 1}),
        "an index of junk": as_pack(b"\xff{"),
        "an index of brackets": as_pack(b"[" * 100_000),
        "more bytes than there are": as_pack([[*SMALL, 5]], b"1234"),
        "bytes left over": as_pack([[*SMALL, 3]], b"1234"),
        "a negative size": as_pack([[*SMALL, -4], ["b", *SMALL[1:], 8]], b"1234"),
        "a size that is text": as_pack([[*SMALL, "4"]], b"1234"),
        "a name twice": as_pack([[*SMALL, 2], [*SMALL, 2]], b"1234"),
        "a name that is beside it": as_pack([["b"], ["b", *SMALL[1:], 4]], b"1234", ["b"]),
        "a name that is nowhere": as_pack([["b"]]),
        "an array that the index forgets": as_pack([[*SMALL, 4]], b"1234", ["b"]),
        "a name of itself": as_pack([[PACK, *SMALL[1:], 4]], b"1234"),
        "an entry that is a number": as_pack([5]),
        "an entry of a list": as_pack([[["a"]]]),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_pack_that_lies_is_refused(record):
    with pytest.raises(UnfitPack):
        unpack_arrays(record[1])


def test_a_length_that_is_beyond_all_memory_is_refused():
    record = as_pack([])
    record[PACK] = Array("uint8", (8,), "collapipe.packed", b"\xff" * 8)
    with pytest.raises(UnfitPack, match="an index of 18446744073709551615 bytes"):
        unpack_arrays(record)
