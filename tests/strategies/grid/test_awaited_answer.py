"""Answers are taken one after the other, as they come, and none is kept by who passes it on."""

import threading
import time
import weakref

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from helpers.fake_grid import FakeGrid
from helpers.hostile_reply import NUM_CLUSTERS, START, honest
from helpers.link_state import Link
from strategies.grid import awaited_answer
from strategies.grid.awaited_answer import AwaitedAnswer, FetchTurns
from strategies.grid.recording import RecordingGrid
from strategies.records import to_arrays

pytestmark = pytest.mark.usefixtures("flower_process")


class Fetch(threading.Thread):
    """An answer that is being fetched until it is told to end."""

    def __init__(self, turns, num_bytes=0):
        super().__init__(daemon=True)
        self.turns, self.num_bytes, self.began, self.ends = turns, num_bytes, threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.turns.held(self.num_bytes):
            self.began.set()
            self.ends.wait(30.0)


def test_one_answer_is_fetched_at_a_time():
    turns = FetchTurns()
    first = Fetch(turns)
    assert first.began.wait(10.0)
    second = Fetch(turns)
    assert not second.began.wait(0.1)
    first.ends.set()
    assert second.began.wait(10.0)
    second.ends.set()


def test_beside_a_slow_answer_another_is_fetched_and_beside_two_any(monkeypatch):
    monkeypatch.setattr(awaited_answer, "_TURN_S", 0.05)
    turns = FetchTurns()
    fetches = [Fetch(turns) for _ in range(4)]
    assert all(fetch.began.wait(10.0) for fetch in fetches)
    for fetch in fetches:
        fetch.ends.set()


def test_a_large_answer_may_take_longer_and_a_stuck_one_holds_up_no_other_for_ever(monkeypatch):
    monkeypatch.setattr(awaited_answer, "_TURN_S", 0.0)
    monkeypatch.setattr(awaited_answer, "_MOST_TURN_S", 0.5)
    turns = FetchTurns()
    stuck, began = Fetch(turns), time.monotonic()
    assert stuck.began.wait(10.0)
    small, large = Fetch(turns, 1000), Fetch(turns, 10**12)
    assert small.began.wait(10.0)
    assert large.began.wait(10.0) and time.monotonic() - began >= 0.5
    for fetch in (stuck, small, large):
        fetch.ends.set()


def test_an_answer_is_passed_on_while_others_are_waited_for_and_is_not_kept():
    link = Link(2)
    exchange = iter(link.bounded().send_and_receive(link.orders(0, 1), timeout=60.0))

    def answer():
        link.answer(link.pull(1))

    threading.Thread(target=answer, daemon=True).start()
    first = next(exchange)
    assert not first.has_error() and first.metadata.src_node_id == link.nodes[1]
    kept = weakref.ref(first)
    del first
    threading.Timer(0.2, lambda: link.answer(link.pull(0))).start()
    assert next(exchange).metadata.src_node_id == link.nodes[0]
    assert kept() is None
    assert list(exchange) == []


def test_each_answer_is_checked_and_let_go_before_the_next_is_waited_for():
    gone = []

    class OneByOne(FakeGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages)
            while replies:
                reply = replies.pop()
                kept = weakref.ref(reply)
                yield reply
                del reply
                gone.append(kept() is None)

    grid = OneByOne(honest, NUM_CLUSTERS)
    content = {"arrays": to_arrays(START), "config": ConfigRecord({"server-round": 1})}
    orders = [Message(RecordDict(content), dst_node_id=node, message_type=MessageType.TRAIN) for node in grid.nodes]
    recording = RecordingGrid(grid, grid.clusters)
    replies = recording.send_and_receive(orders)
    assert gone == [True] * NUM_CLUSTERS
    # The last comes first; sums go in the order of the clusters.
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.nodes)
    assert recording.last_round["failed"] == []


def test_a_late_answer_that_takes_longer_than_the_look_for_it_is_not_lost():
    """The SuperLink gives it once: who threw it away asked in vain from then on, and its node got no order again."""
    order = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    pulls, is_late = [], threading.Event()

    class SlowGrid(FakeGrid):
        def pull_messages(self, message_ids):
            pulls.append(message_ids)
            if not is_late.is_set():
                return []
            time.sleep(0.3)
            return [Message(RecordDict(), reply_to=order)] if len(pulls) == 2 else []

    awaited = AwaitedAnswer(SlowGrid(None, 1), "order", 1, 0, "", 0.01, FetchTurns(), threading.Event())
    awaited.give_up()
    awaited.join(10.0)
    del pulls[1:]
    is_late.set()
    assert not awaited.look(0.05)
    assert awaited.look(10.0) and len(pulls) == 2
    assert awaited.take() is None


class CountingGrid(FakeGrid):
    """Has an answer from the second look on."""

    def __init__(self):
        super().__init__(None, 1)
        self.order = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
        self.looks, self.looked = 0, threading.Event()

    def pull_messages(self, message_ids):
        self.looks += 1
        self.looked.set()
        return [Message(RecordDict(), reply_to=self.order)] if self.looks > 1 else []


def awaited_answer_of(grid, poll_s):
    answer = AwaitedAnswer(grid, "order", 1, 0, "", poll_s, FetchTurns(), threading.Event())
    assert grid.looked.wait(10.0)
    return answer


def test_an_answer_that_is_expected_sooner_is_looked_for_at_once():
    awaited = awaited_answer_of(CountingGrid(), 1000.0)
    awaited.expect(900.0)
    awaited.join(10.0)
    assert awaited.take() is not None


def test_one_that_is_expected_later_is_not_looked_for_until_then():
    grid = CountingGrid()
    awaited = awaited_answer_of(grid, 1000.0)
    awaited.expect(2000.0)
    awaited.expect(2000.0)
    awaited.join(0.3)
    assert grid.looks == 1 and awaited.is_alive()
    awaited.give_up()
    awaited.join(10.0)
    # Whoever gives up looks no more.
    assert grid.looks == 1 and not awaited.is_alive()
