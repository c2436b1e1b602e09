"""Exchanges end when no answer can come any more: with Flower's own link state, nodes that die, and a real decoder."""

import re
import threading

import pytest

from helpers.decoder_cases import batch_of, service_of, train_round
from helpers.link_state import FOR_EVER, Link
from strategies.flower_names import INVALID_FAB
from strategies.grid import reply_timeouts as bounded_grid
from strategies.grid.reply_timeouts import Missing, NobodyConnected

pytestmark = pytest.mark.usefixtures("flower_process")


class Exchange(threading.Thread):
    """An exchange in a thread of its own."""

    def __init__(self, grid, orders):
        super().__init__(daemon=True)
        self.grid, self.orders, self.replies = grid, orders, None
        self.start()

    def run(self):
        self.replies = list(self.grid.send_and_receive(self.orders, timeout=86400.0))

    def end(self):
        """The reasons of the failed orders and None for the others, by cluster."""
        self.join(120)
        assert not self.is_alive(), "the exchange goes on"
        clusters = {order.metadata.dst_node_id: n for n, order in enumerate(self.orders)}
        return {
            clusters[reply.metadata.src_node_id]: reply.error.reason if reply.has_error() else None
            for reply in self.replies
        }


def test_a_node_whose_heartbeats_stop_is_its_own_clusters_failure_and_leaves_the_decoder_at_once(monkeypatch):
    monkeypatch.setattr(bounded_grid, "_LOOK_S", 0.1)
    link = Link(2)
    with service_of(2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        exchange = Exchange(link.bounded(service.trainer), link.orders(0, 1))
        first = link.pull(0)
        link.pull(1)
        link.beat_for(1, 1.6)
        # The barrier opens with the loss, and long before the join timeout of 20 s.
        train_round(addresses[0], [batch_of(0, 4)])
        reason = service.trainer.current.standings()[1].reason
        said = re.fullmatch(
            r"its SuperNode has sent no heartbeat for (\d+) s: it ended, was stopped, or is cut off", reason
        )
        assert said and 2 <= int(said[1]) < 30
        link.answer(first)
        assert exchange.end() == {0: None, 1: reason}


def test_a_node_that_beats_and_never_answers_holds_a_round_only_for_the_grace_after_the_decoders(
    monkeypatch,
):
    monkeypatch.setattr(bounded_grid, "WORTH_TELLING_S", 0.1)
    link = Link(2)
    with service_of(2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        # As long as a busy machine may need to pass the first answer on.
        grid = link.bounded(service.trainer, reply_timeout_s=2.0)
        exchange = Exchange(grid, link.orders(0, 1))
        first, second = link.pull(0), link.pull(1)
        other = threading.Thread(target=train_round, args=(addresses[1], [batch_of(1, 4)]))
        other.start()
        train_round(addresses[0], [batch_of(0, 4)])
        other.join()
        link.answer(first)
        assert "its update did not come within 2 s of its goodbye" in exchange.end()[1]
        assert [Missing(1, "it has trained, and its update has not come")] in link.waits and link.waits[-1] == []
        # Until it has answered it is asked nothing more.
        assert set(grid.get_node_ids()) == {link.nodes[0]}
        link.answer(second)
        assert set(grid.get_node_ids()) == set(link.nodes)


@pytest.mark.slow
def test_a_node_that_never_joins_the_decoder_fails_when_the_others_have_waited_for_it():
    link = Link(2)
    with service_of(2, join_s=0.5) as service:
        addresses = service.open_round(1, [0, 1], 1)
        exchange = Exchange(link.bounded(service.trainer), link.orders(0, 1))
        first = link.pull(0)
        train_round(addresses[0], [batch_of(0, 4)])
        link.answer(first)
        assert exchange.end() == {0: None, 1: "it did not join within 0.5 s of the first"}


def test_who_says_that_it_failed_is_waited_for_no_longer_at_the_decoder():
    link = Link(2)
    with service_of(2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        exchange = Exchange(link.bounded(service.trainer), link.orders(0, 1))
        first = link.pull(0)
        link.answer(link.pull(1), error="its disk is full\nfaults: []")
        train_round(addresses[0], [batch_of(0, 4)])
        link.answer(first)
        assert exchange.end() == {0: None, 1: "its disk is full\nfaults: []"}
        assert service.trainer.current.standings()[1].reason == "its disk is full"


def test_a_control_unit_that_refuses_the_runs_app_is_said_with_the_remedy():
    link = Link(1)
    exchange = Exchange(link.bounded(), link.orders(0))
    link.answer(link.pull(0), "The FAB could not be verified.", INVALID_FAB)
    assert "install the same release on the server and all control units" in exchange.end()[0]


def test_a_supernode_that_was_started_again_has_lost_its_order_and_is_asked_again(monkeypatch):
    monkeypatch.setattr(bounded_grid, "_LOOK_S", 0.1)
    link = Link(2)
    grid = link.bounded()
    exchange = Exchange(grid, link.orders(0, 1))
    first = link.pull(0)
    link.pull(1)
    link.start_again(1)
    link.answer(first)
    assert exchange.end()[1] == "its SuperNode was started again, or lost contact, after the order was sent"
    assert set(grid.get_node_ids()) == set(link.nodes)


def test_without_a_decoder_the_slowest_answer_so_far_says_how_long_the_next_may_take():
    link = Link(2)
    exchange = Exchange(link.bounded(reply_timeout_s=0.3), link.orders(0, 1))
    first = link.pull(0)
    link.answer(first)
    assert "after the last one" in exchange.end()[1]


def test_without_a_decoder_the_last_round_says_how_long_a_first_answer_may_take():
    """A single cluster, and many of which all others fail, have no other answer to go by."""
    link = Link(2)
    grid = link.bounded(reply_timeout_s=0.3)
    whole = Exchange(grid, link.orders(0, 1))
    for cluster in (0, 1):
        link.answer(link.pull(cluster))
    assert whole.end() == {0: None, 1: None}
    next_round = Exchange(grid, link.orders(0, 1))
    link.answer(link.pull(0), error="no data")
    reasons = next_round.end()
    assert "no data" in reasons[0] and "after the last one" in reasons[1]


def test_a_run_waits_for_its_nodes_when_all_are_away_and_not_for_ever(monkeypatch):
    link = Link(2)
    grid = link.bounded()
    for node in link.nodes:
        link.state.deactivate_node(node)
    threading.Timer(0.3, lambda: link.state.activate_node(link.nodes[1], FOR_EVER)).start()
    assert list(grid.get_node_ids()) == [link.nodes[1]]
    assert link.waits == [[Missing(n, "its node is not connected") for n in (0, 1)], []]
    link.state.deactivate_node(link.nodes[1])
    monkeypatch.setattr(bounded_grid, "NOBODY_S", 0.1)
    with pytest.raises(NobodyConnected, match=r"no node of clusters \[0, 1\] came in 0.1 s"):
        grid.get_node_ids()
