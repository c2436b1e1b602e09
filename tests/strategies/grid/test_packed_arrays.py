"""Small arrays in one: who unpacks has what was sent, and a pack that lies is refused without its memory."""

import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict

from flower_app.node.client_mods import packed_mod
from helpers.wire_grid import HOSTILE, NUM_CLUSTERS, START, WireGrid, round_of
from strategies.grid import packed_arrays
from strategies.grid.packed_arrays import PACK, UnfitPack, pack_arrays, packed_messages, unpack_arrays
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


def order(record):
    return Message(RecordDict({"arrays": record, "config": ConfigRecord({"round": 3})}), 7, MessageType.TRAIN)


def answered(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def test_an_answer_is_packed_if_its_order_was():
    context = Context(1, 7, {}, RecordDict(), {})
    record = record_with(**MANY)
    (sent,) = packed_messages([order(record)])
    assert list(sent.content["arrays"]) == [PACK, "large"] and sent.content["config"]["round"] == 3
    reply = packed_mod(sent, context, answered)
    assert list(unpack_arrays(reply.content["arrays"])) == list(MANY)
    plain = packed_mod(order(record), context, answered)
    assert list(plain.content["arrays"]) == list(MANY)
    failed = packed_mod(sent, context, lambda message, _: Message(Error(3, "no"), reply_to=message))
    assert failed.has_error()


def test_messages_of_one_record_have_one_pack_and_their_own_numbers():
    record = record_with(**MANY)
    orders = [order(record), order(record)]
    first, second = packed_messages(orders)
    assert first.content["arrays"] is second.content["arrays"]
    assert first.metadata is orders[0].metadata and list(orders[0].content["arrays"]) == list(MANY)


def test_a_round_over_the_wire_has_few_pieces_and_the_same_weights(monkeypatch):
    numbers = []

    def count(reply, pieces):
        numbers.append(sum(piece.startswith(b"Array ") for piece in pieces.values()))
        return pieces

    def answering(self, message, cluster):
        assert list(message.content["arrays"]) == [PACK]
        context = Context(1, cluster, {}, RecordDict(), {})
        return packed_mod(message, context, lambda order, _: plain(self, order, cluster))

    plain = WireGrid.answer
    monkeypatch.setattr(WireGrid, "answer", answering)
    weights, record = round_of(count)
    # Of the one that the grid tampers with.
    assert numbers == [1] and record["failed"] == []
    for name, value in START.items():
        assert weights[name].tolist() == (value + (NUM_CLUSTERS - 1) / 2).tolist()


def test_a_reply_with_a_false_pack_is_that_replys_error(monkeypatch):
    def lie(self, message, cluster):
        reply = plain(self, message, cluster)
        if cluster == HOSTILE:
            reply.content["arrays"] = as_pack([["a"]])
        return reply

    plain = WireGrid.answer
    monkeypatch.setattr(WireGrid, "answer", lie)
    _, record = round_of(lambda reply, pieces: pieces)
    assert [entry["cluster"] for entry in record["failed"]] == [HOSTILE]
    assert record["failed"][0]["reason"].startswith(f"its reply cannot be put together: {PACK}: an entry")
