"""A small message in one record: who unpacks has what was sent, and a parcel that lies is one reply's error."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flower_app.client_app import packed_mod
from helpers.wire_grid import NUM_CLUSTERS, START, WireGrid, round_of
from strategies.grid.packed_arrays import PACK, UnfitPack
from strategies.grid.parcels import PARCEL, packed_messages, unpack_message
from strategies.grid.update_spool import SMALL_BYTES

pytestmark = pytest.mark.usefixtures("flower_process")

CONTEXT = Context(1, 7, {}, RecordDict(), {})
SMALL = {"b": np.arange(3, dtype=np.float32), "a": np.ones((2, 3), np.float16)}
LARGE = {**SMALL, "large": np.zeros(70_000, np.float32)}


def record_with(values):
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def order(record):
    records = {"arrays": record, "config": ConfigRecord({"round": 3, "names": ["x"], "raw": b"\x00\xff"})}
    return Message(RecordDict(records), 7, MessageType.TRAIN)


def answered(message, context):
    metrics = MetricRecord({"loss": 0.5, "steps": 3})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


def values(record):
    return {name: array.numpy().tolist() for name, array in record.items()}


def test_a_small_message_has_three_objects_each_way_and_arrives_as_it_was():
    plain = order(record_with(SMALL))
    (sent,) = packed_messages([plain])
    assert list(sent.content) == [PARCEL] and len(get_all_nested_objects(sent)) == 3
    seen = []

    def answer(message, context):
        seen.append(dict(message.content))
        return answered(message, context)

    reply = packed_mod(sent, CONTEXT, answer)
    assert values(seen[0]["arrays"]) == values(plain.content["arrays"])
    assert seen[0]["config"] == plain.content["config"] and list(seen[0]) == list(plain.content)
    assert list(reply.content) == [PARCEL] and len(get_all_nested_objects(reply)) == 3
    assert unpack_message(reply) and not unpack_message(reply)
    assert dict(reply.content["metrics"]) == {"loss": 0.5, "steps": 3}
    assert values(reply.content["arrays"]) == values(plain.content["arrays"])


HALF = SMALL_BYTES // 2
SUMS = {
    "two records of arrays": [HALF, HALF],
    "three of a little over a third": [SMALL_BYTES // 3 + 1] * 3,
    "one, and a few bytes of settings": [SMALL_BYTES - 100, 100],
}


@pytest.mark.parametrize("sizes", SUMS.values(), ids=SUMS)
def test_the_records_of_a_parcel_are_small_together(sizes):
    """Each of them was small, and all were put into one that its receiver refuses."""
    content = RecordDict({str(i): ConfigRecord({"raw": bytes(size)}) for i, size in enumerate(sizes)})
    message = Message(content, 7, MessageType.TRAIN)
    (sent,) = packed_messages([message])
    assert list(sent.content) == list(content) and not unpack_message(sent)
    small = RecordDict({str(i): ConfigRecord({"raw": bytes(size - 200)}) for i, size in enumerate(sizes) if size > 200})
    (sent,) = packed_messages([Message(small, 7, MessageType.TRAIN)])
    assert list(sent.content) == [PARCEL] and unpack_message(sent) and dict(sent.content) == dict(small)


@pytest.mark.parametrize("arrays", [SMALL, LARGE])
def test_messages_of_one_record_are_packed_once_and_have_their_own_numbers(arrays):
    record = record_with(arrays)
    orders = [order(record), order(record)]
    first, second = packed_messages(orders)
    if arrays is LARGE:
        assert first.content["arrays"] is second.content["arrays"]
    else:
        assert first.content[PARCEL]["arrays"] is second.content[PARCEL]["arrays"]
    assert first.metadata is orders[0].metadata and list(orders[0].content["arrays"]) == list(arrays)


def test_a_round_over_the_wire_has_few_pieces_and_the_same_weights(monkeypatch):
    numbers = []

    def count(reply, pieces):
        numbers.append(len(pieces))
        return pieces

    def answering(self, message, cluster):
        assert list(message.content) == [PARCEL]
        return packed_mod(message, CONTEXT, lambda order, _: plain(self, order, cluster))

    plain = WireGrid.answer
    monkeypatch.setattr(WireGrid, "answer", answering)
    weights, record = round_of(count)
    # Of the one that the grid tampers with.
    assert numbers == [3] and record["failed"] == []
    for name, value in START.items():
        assert weights[name].tolist() == (value + (NUM_CLUSTERS - 1) / 2).tolist()


def parcel(**contents):
    return {PARCEL: ConfigRecord(contents)}


def pack_of(index):
    record = ArrayRecord()
    header = json.dumps(index).encode()
    data = len(header).to_bytes(8, "big") + header
    record[PACK] = Array("uint8", (len(data),), "collapipe.packed", data)
    return record


LIES = {
    "a false pack of arrays": {"arrays": pack_of([["a"]])},
    "no records": parcel(),
    "no bytes": parcel(arrays=3),
    "nothing at all": parcel(arrays=b""),
    "an unknown kind": parcel(arrays=b"z"),
    "a parcel that is no record of settings": {PARCEL: pack_of([])},
    "another record beside it": {**parcel(), "arrays": pack_of([])},
    "junk for arrays": parcel(arrays=b"ajunk"),
    "arrays beyond all memory": parcel(arrays=b"a" + b"\xff" * 8),
    "a false index": parcel(arrays=b"a" + (2).to_bytes(8, "big") + b"[3"),
    "junk for settings": parcel(config=b"cjunk"),
    "another kind of object": parcel(config=b"c" + MetricRecord({"x": 1}).deflate()),
    "no protocol": parcel(config=b"cConfigRecord  4\x00\xff\xff\xff\xff"),
    "junk for metrics": parcel(metrics=b"m\x00"),
    "a hundred thousand records": parcel(**{str(i): b"c" + ConfigRecord({}).deflate() for i in range(100_000)}),
    "more bytes than a small message has": parcel(arrays=b"a" + bytes(SMALL_BYTES)),
    "more bytes in all its records": parcel(
        **{str(i): b"c" + ConfigRecord({"raw": bytes(SMALL_BYTES // 2)}).deflate() for i in range(2)}
    ),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_an_order_that_lies_is_refused(content):
    message = Message(RecordDict(content), 7, MessageType.TRAIN)
    if content == parcel():
        assert unpack_message(message) and not message.content
        return
    with pytest.raises(UnfitPack, match="collapipe/"):
        unpack_message(message)
