"""One client app serves clusters that wait for each other: orders are answered at once, and collected later."""

import threading

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from client_pipeline.runtime.control_unit.round_order import HandOver
from helpers.link_state import Link
from strategies.grid.handed_over import HandedOverOrders
from strategies.grid.parcels import packed_messages, unpack_message
from strategies.grid.reply_timeouts import BoundedGrid
from strategies.grid.single_pulls import SinglePulls
from strategies.records import ARRAYS, CONFIG, read_train_config, under_way

pytestmark = pytest.mark.usefixtures("flower_process")
WEIGHTS = ArrayRecord({"w": Array(np.arange(4, dtype=np.float32))})


class OneClientApp(threading.Thread):
    """Nodes whose messages are answered one after the other; a round is over when all clusters have begun it."""

    def __init__(self, link, failing=()):
        super().__init__(daemon=True)
        self.link, self.failing, self.begun, self.seen = link, failing, set(), []
        self.ended = threading.Event()
        self.start()

    def run(self):
        while not self.ended.wait(0.005):
            for cluster, node in enumerate(self.link.nodes):
                for message in self.link.state.get_message_ins(node, 1):
                    self.answer(message, cluster)

    def answer(self, message, cluster):
        is_packed = unpack_message(message)
        order = read_train_config(message.content[CONFIG], cluster)
        self.seen.append((cluster, order.hand_over, ARRAYS in message.content))
        if order.hand_over is HandOver.BEGIN:
            self.begun.add(cluster)
        if order.hand_over is HandOver.BEGIN or len(self.begun) < len(self.link.nodes):
            content = under_way()
        elif cluster in self.failing:
            content = Error(2, "no power")
        else:
            content = RecordDict({"answer": ConfigRecord({"cluster": cluster, "round": order.round})})
        reply = Message(content, reply_to=message)
        if is_packed:
            (reply,) = packed_messages([reply])
        reply.metadata.__dict__["_message_id"] = f"reply to {message.metadata.message_id}"
        assert self.link.state.store_message_res(reply)


def exchange(num_clusters, **options):
    link = Link(num_clusters)
    client = OneClientApp(link, **options)
    try:
        grid = BoundedGrid(HandedOverOrders(SinglePulls(link.grid), with_weights=False), link.clusters)
        orders = link.orders(*range(num_clusters))
        for order in orders:
            order.content[ARRAYS] = WEIGHTS
        replies = list(grid.send_and_receive(orders, timeout=120))
    finally:
        client.ended.set()
        client.join()
    return link, client, orders, replies


def test_clusters_that_wait_for_each_other_are_served_by_one_client_app():
    link, client, orders, replies = exchange(5)
    assert sorted(reply.content["answer"]["cluster"] for reply in replies) == list(range(5))
    # For the strategy it is one exchange: each answer names its order and its node.
    ids = {order.metadata.message_id: order.metadata.dst_node_id for order in orders}
    assert {reply.metadata.reply_to_message_id: reply.metadata.src_node_id for reply in replies} == ids
    assert len(client.seen) >= 10


def test_weights_go_to_each_node_once():
    _, client, _, _ = exchange(2)
    assert {(purpose, has_weights) for _, purpose, has_weights in client.seen} == {
        (HandOver.BEGIN, True),
        (HandOver.COLLECT, False),
    }


def test_a_failure_is_its_orders_answer():
    link, _, _, replies = exchange(2, failing=(1,))
    reasons = {
        link.clusters[reply.metadata.src_node_id]: reply.error.reason if reply.has_error() else "" for reply in replies
    }
    assert reasons == {0: "", 1: "no power"}


def test_mods_that_read_the_weights_get_them_with_each_message():
    link = Link(1)
    grid = HandedOverOrders(SinglePulls(link.grid), with_weights=True)
    (order,) = link.orders(0)
    order.content[ARRAYS] = WEIGHTS
    (message_id,) = grid.push_messages([order])
    client = OneClientApp(link)
    try:
        while not (replies := list(grid.pull_messages([message_id]))):
            pass
    finally:
        client.ended.set()
        client.join()
    assert not replies[0].has_error() and all(has_weights for _, _, has_weights in client.seen)


def test_messages_of_other_kinds_are_not_handed_over():
    link = Link(1)
    grid = HandedOverOrders(SinglePulls(link.grid), with_weights=False)
    (order,) = link.orders(0, kind="query")
    (message_id,) = grid.push_messages([order])
    link.answer(link.pull(0))
    assert [reply.metadata.reply_to_message_id for reply in grid.pull_messages([message_id])] == [message_id]
    assert "hand-over" not in order.content[CONFIG]
