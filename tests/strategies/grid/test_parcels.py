"""A small message in one record: who unpacks has what was sent, and a parcel that lies is one reply's error."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict

from flower_app.node.client_mods import packed_mod
from helpers.wire_grid import HOSTILE, NUM_CLUSTERS, START, WireGrid, round_of
from strategies.flower_internals import get_all_nested_objects
from strategies.grid.packed_arrays import PACK, UnfitPack, unpack_arrays
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


def test_a_message_that_is_not_small_has_its_small_arrays_in_one():
    record = record_with(LARGE)
    (sent,) = packed_messages([order(record)])
    assert list(sent.content["arrays"]) == [PACK, "large"] and sent.content["config"]["round"] == 3
    reply = packed_mod(sent, CONTEXT, answered)
    assert list(unpack_arrays(reply.content["arrays"])) == list(LARGE)


def test_many_small_arrays_are_no_small_message():
    record = record_with({str(i): np.zeros(60_000, np.float32) for i in range(10)})
    (sent,) = packed_messages([order(record)])
    assert list(sent.content["arrays"]) == [PACK]
    assert unpack_message(sent) and values(sent.content["arrays"]) == values(record)


def test_a_message_of_many_records_is_sent_as_it_is():
    content = RecordDict({str(i): ConfigRecord({"i": i}) for i in range(17)})
    (sent,) = packed_messages([Message(content, 7, MessageType.TRAIN)])
    assert len(sent.content) == 17 and not unpack_message(sent)


def test_an_answer_is_packed_if_its_order_was():
    plain = packed_mod(order(record_with(SMALL)), CONTEXT, answered)
    assert list(plain.content) == ["arrays", "metrics"] and list(plain.content["arrays"]) == list(SMALL)
    (sent,) = packed_messages([order(record_with(SMALL))])
    failed = packed_mod(sent, CONTEXT, lambda message, _: Message(Error(3, "no"), reply_to=message))
    assert failed.has_error()


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
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_reply_that_lies_about_what_is_packed_is_that_replys_error(content, monkeypatch):
    def lie(self, message, cluster):
        reply = plain(self, message, cluster)
        return Message(RecordDict(content), reply_to=message) if cluster == HOSTILE else reply

    plain = WireGrid.answer
    monkeypatch.setattr(WireGrid, "answer", lie)
    _, record = round_of(lambda reply, pieces: pieces)
    assert [entry["cluster"] for entry in record["failed"]] == [HOSTILE]


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_an_order_that_lies_is_refused(content):
    message = Message(RecordDict(content), 7, MessageType.TRAIN)
    if content == parcel():
        assert unpack_message(message) and not message.content
        return
    with pytest.raises(UnfitPack, match="collapipe/"):
        unpack_message(message)
