"""Replies belong to the message that they answer, whoever their sender says it is."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from helpers.fake_grid import FIRST_NODE, FakeGrid, superlink_error
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.grid.recording import RecordingGrid, RoundFailed

pytestmark = pytest.mark.usefixtures("flower_process")


def honest(message, cluster):
    return answer_to(message, cluster, {"embedding.w": torch.full((4,), float(cluster))})


def orders(num=3):
    arrays = ArrayRecord({"embedding.w": Array(np.zeros(4, dtype=np.float32))})
    content = {"arrays": arrays, "config": ConfigRecord({"server-round": 1})}
    return [
        Message(RecordDict(dict(content)), dst_node_id=FIRST_NODE + n, message_type=MessageType.TRAIN)
        for n in range(num)
    ]


def exchanged(client, num=3):
    grid = FakeGrid(client, num)
    recording = RecordingGrid(grid, grid.clusters)
    try:
        replies = recording.send_and_receive(orders(num))
    except KeyError as error:
        raise AssertionError(f"the exchange ended with {error!r}") from error
    return {reply.metadata.src_node_id - FIRST_NODE: reply for reply in replies}, recording.last_round


def test_an_error_of_the_superlink_itself_is_the_failure_of_the_cluster_that_was_asked():
    """Its sender is node 1, which is nobody's: this used to end the run with a KeyError."""

    def client(message, cluster):
        return superlink_error(message) if cluster == 1 else honest(message, cluster)

    replies, record = exchanged(client)
    assert sorted(replies) == [0, 1, 2] and [n for n, reply in replies.items() if reply.has_error()] == [1]
    assert record["failed"] == [{"cluster": 1, "reason": "Node Unavailable"}]
    assert [report["cluster"] for report in record["clusters"]] == [0, 2]


def test_a_stock_strategy_goes_on_without_the_node_that_the_superlink_gave_up():
    grid = FakeGrid(lambda message, n: superlink_error(message) if n == 1 else honest(message, n), 3)
    recording = RecordingGrid(grid, grid.clusters)
    arrays = ArrayRecord({"embedding.w": Array(np.zeros(4, dtype=np.float32))})
    try:
        result = make_stock("FedAvg", {}, 3).start(recording, initial_arrays=arrays, num_rounds=1)
    except KeyError as error:
        raise AssertionError(f"the run ended with {error!r}") from error
    np.testing.assert_array_equal(result.arrays["embedding.w"].numpy(), 1.0)


def test_a_reply_to_no_order_and_a_second_reply_are_left_out():
    def client(message, cluster):
        first, second = honest(message, cluster), honest(message, cluster)
        if cluster == 2:
            first.metadata.__dict__["_reply_to_message_id"] = "of another round"
        return [first, second] if cluster == 0 else first

    replies, record = exchanged(client)
    assert [n for n, reply in sorted(replies.items()) if not reply.has_error()] == [0, 1]
    assert record["failed"] == [{"cluster": 2, "reason": "no reply in time"}]
    assert [report["cluster"] for report in record["clusters"]] == [0, 1]


def test_a_cluster_cannot_answer_for_another():
    """The sender that a reply names is what its client wrote there."""

    def client(message, cluster):
        reply = honest(message, cluster)
        if cluster == 2:
            reply.metadata.__dict__["_src_node_id"] = FIRST_NODE
        return reply

    replies, record = exchanged(client)
    assert sorted(replies) == [0, 1, 2]
    assert [record["failed"], sorted(report["cluster"] for report in record["clusters"])] == [[], [0, 1, 2]]


def test_a_round_that_only_the_superlink_answers_names_every_cluster():
    with pytest.raises(RoundFailed, match="cluster 0: Node Unavailable; cluster 1: Node Unavailable"):
        exchanged(lambda message, cluster: superlink_error(message), num=2)
