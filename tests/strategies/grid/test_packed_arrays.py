"""Small arrays in one: who unpacks has what was sent, and a pack that lies is refused without its memory."""

import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.grid import packed_arrays
from strategies.grid.packed_arrays import PACK, UnfitPack, pack_all, pack_arrays, unpack_all, unpack_arrays
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


@pytest.mark.parametrize(
    "record", [record_with(), record_with(a=1.0), record_with(a=np.zeros(70_000, np.float32), b=1.0)]
)
def test_a_record_without_two_small_arrays_stays_as_it_is(record):
    assert pack_arrays(record) is record and unpack_arrays(record) is record


@pytest.mark.parametrize("num_arrays", [0, 1, 4])
def test_all_of_a_record_is_packed_if_all_is_small(num_arrays):
    small = {name: value for name, value in MANY.items() if name != "large"}
    record = record_with(**dict(list(small.items())[:num_arrays]))
    num_bytes = sum(len(array.data) for array in record.values())
    content = pack_all(record, num_bytes)
    assert [(name, array.data) for name, array in unpack_all(content).items()] == [
        (name, array.data) for name, array in record.items()
    ]
    assert num_arrays == 0 or pack_all(record, num_bytes - 1) is None
    assert pack_all(record_with(**MANY), 1 << 30) is None


def test_more_names_than_an_index_may_have_are_sent_one_by_one(monkeypatch):
    monkeypatch.setattr(packed_arrays, "_INDEX_BYTES", 60)
    record = record_with(a=1.0, b=2.0)
    assert pack_arrays(record) is record


def test_a_record_of_many_bytes_is_packed_up_to_the_limit(monkeypatch):
    record = record_with(**{str(i): np.full(100, i, np.float32) for i in range(10)})
    monkeypatch.setattr(packed_arrays, "_PACK_BYTES", 3 * len(record["0"].data) + 1)
    parcel = pack_arrays(record)
    assert list(parcel) == [PACK, *(str(i) for i in range(3, 10))]
    assert [array.data for array in unpack_arrays(parcel).values()] == [array.data for array in record.values()]


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


def test_a_pack_of_empty_arrays_takes_little():
    """Each entry is a Python object of a kilobyte: their number is bounded by the length of the index."""
    entries = [[str(i), "", [], "", 0] for i in range(1_000_000)]
    record = as_pack(entries)
    del entries
    tracemalloc.start()
    with pytest.raises(UnfitPack, match="an index of"):
        unpack_arrays(record)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
