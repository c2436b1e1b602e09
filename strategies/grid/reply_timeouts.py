"""A Grid that waits for no answer that cannot come: each exchange ends a bounded time after its last sign of life.

Flower's own exchange waits for all answers until its timeout, which for a training round has to be a day. Here an
order fails as soon as one of these is known:

* the SuperLink says that the node has signed off, that its heartbeats have stopped (within a minute), or that its
  SuperNode was started again: what it had been sent is lost with it;
* its cluster has left the decoder's round, and its own error does not come within :data:`LAST_WORDS_S`, or
  :data:`LOST_S` if the cluster had been silent;
* its cluster has said goodbye to the decoder, and its update does not come within ``reply_timeout_s``;
* without a decoder: it takes many times longer than the others did, or than any in the round before.

A node that owes an answer hears of no further round until it has answered, was started again, or was away: a SuperNode
takes one message after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from threading import Event
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from strategies.decoder.round import Standing
from strategies.decoder.trainer import DecoderTrainer
from strategies.flower_internals import ObjectPushError
from strategies.flower_names import INVALID_FAB, MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE, log
from strategies.grid.awaited_answer import AwaitedAnswer, FetchTurns
from strategies.grid.forwarding import ForwardingGrid
from strategies.grid.reply_matching import answer_of, error_reason, failed, note_exchange
from strategies.grid.single_pulls import UnfitReply
from strategies.grid.update_spool import message_bytes

LAST_WORDS_S = 60.0
"""Time for the error of a control unit that has left the decoder's round [s]."""
LOST_S = 5.0
"""The same of one from which the decoder has heard nothing for long [s]."""
BEGIN_S = 900.0
"""Time for control units to begin a round: one that was lost loads its data first [s]."""
NOBODY_S = 180.0
"""Longest time of a run without any of its nodes [s]."""
WORTH_TELLING_S = 5.0
"""Delay behind the first answer, or the first hello, after which a cluster is reported as late [s]."""
_SLOWER = 5.0
"""Without a decoder, the next answer may take this many times as long as the slowest one before, of this round or the
last one."""
_LOOK_S = 5.0
"""Interval of the questions to the SuperLink for SuperNodes that are gone, or were started again [s]."""
_LATE_S = 2.0
"""Time to fetch an answer that is long overdue, before the next round begins [s]."""
_DUE, _MANY = 0.1, 40
"""An answer whose control unit has said goodbye to the decoder is looked for ten times as often, unless many are."""
_TRAINS = 5.0
"""One whose control unit still trains comes, if at all, with an error: it is looked for a fifth as often."""
_NOTICE_S = 0.2
"""Interval of looks at the clusters' standing, in this process alone [s]."""
_PATIENCE = 2
"""Heartbeats that may be missing until the SuperLink takes a node for gone."""


class NobodyConnected(RuntimeError):
    """No node of the run has been connected for long."""


class Missing(NamedTuple):
    """A cluster that an exchange waits for."""

    cluster: int
    reason: str


class BoundedGrid(ForwardingGrid):
    """Passes everything on to ``grid``, and gives up answers that cannot come.

    Parameters
    ----------
    grid : Flower's own
    clusters : cluster index of each node id; other nodes pass unseen
    decoder : of the rounds; None: the control units train it themselves
    reply_timeout_s : how long a cluster's update may take after its goodbye to the decoder [s]
    on_wait : told whom an exchange waits for whenever that changes; an empty list when it ends
    """

    def __init__(
        self,
        grid: Grid,
        clusters: Mapping[int, int],
        decoder: DecoderTrainer | None = None,
        *,
        reply_timeout_s: float = 600.0,
        on_wait: Callable[[Sequence[Missing]], None] = lambda missing: None,
    ) -> None:
        super().__init__(grid)
        self._clusters = dict(clusters)
        self._decoder = decoder
        self._reply_timeout_s = reply_timeout_s
        self._on_wait = on_wait
        # Flower's in-memory grid says how often it may be asked; over a network once a second is enough.
        self._poll_s = float(getattr(grid, "pull_interval", 1.0))
        self._turns = FetchTurns()
        self._ended = Event()
        """Set when a thread that waits for an answer has ended."""
        self._nodes_seen: dict[int, Any] = {}
        """Each node as the SuperLink described it last."""
        self._answers_owed: list[AwaitedAnswer] = []
        """Answers to orders that were given up."""
        self._reported: list[Missing] = []
        self._slowest_s: float | None = None
        """Longest wait for an answer in the last round of training that had one [s]."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected and owe no answer; waits, with a bound, if none of the run is there.

        Raises
        ------
        NobodyConnected
            If none comes back in time; the message names the clusters.
        """
        deadline = time.monotonic() + NOBODY_S
        while True:
            nodes = self._connected_nodes()
            self._settle_debts(nodes)
            busy = {awaited.node_id for awaited in self._answers_owed}
            ready = [node.node_id for node in nodes if node.node_id not in busy]
            if not self._clusters or self._clusters.keys() & set(ready):
                self._tell([])
                return ready
            self._tell([Missing(cluster, "its node is not connected") for cluster in sorted(self._clusters.values())])
            if time.monotonic() > deadline:
                raise NobodyConnected(f"no node of clusters {sorted(self._clusters.values())} came in {NOBODY_S:g} s")
            time.sleep(self._poll_s)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Exchange messages; each gets an answer, which may be an error of our own that says what is missing.

        Answers are passed on as they come, and none is kept: whoever iterates decides how many there are at once.
        """
        orders = list(messages)
        if not orders:
            return
        kind = orders[0].metadata.message_type
        exchange = _Exchange(self._decoder, self._clusters, self._reply_timeout_s, kind, self._slowest_s)
        awaited_orders, pending, refusals = self._push(orders)
        looked = time.monotonic()
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            yield from refusals
            while pending:
                self._ended.clear()
                given_up = exchange.overdue([awaited_orders[message_id] for message_id in pending])
                if time.monotonic() > looked + _LOOK_S:
                    looked = time.monotonic()
                    given_up |= self._disconnected(pending)
                if time.monotonic() > end:
                    given_up = dict.fromkeys(pending, "no reply in time") | given_up
                for message_id in list(pending):
                    answer = self._answer(pending[message_id], awaited_orders[message_id], given_up.get(message_id))
                    if answer is None:
                        continue
                    del pending[message_id]
                    exchange.answered(answer)
                    yield answer
                    # The next one is not waited for with this one in memory.
                    del answer
                missing_from = [awaited_orders[message_id] for message_id in pending]
                self._tell(exchange.missing(missing_from))
                due_s = self._poll_s * max(len(pending) / _MANY, _DUE)
                for order, place in zip(missing_from, exchange.places(missing_from), strict=True):
                    often_s = {"finished": due_s, "trains": self._poll_s * _TRAINS}.get(place, self._poll_s)
                    pending[order.metadata.message_id].expect(often_s)
                if pending:
                    self._ended.wait(min(self._poll_s, _NOTICE_S))
        finally:
            self._slowest_s = exchange.slowest_s or self._slowest_s
            for awaited in pending.values():
                awaited.give_up()

    def _answer(self, awaited: AwaitedAnswer, order: Message, given_up: str | None) -> Message | None:
        """Return what an order has come to; None: it is waited for."""
        if isinstance(awaited.error, UnfitReply):
            return failed(order, str(awaited.error), MESSAGE_UNAVAILABLE)
        if awaited.error is not None:
            raise awaited.error
        if (reply := awaited.take()) is not None:
            awaited.give_up()
            answer = self._attributed(reply, order)
            note_exchange(answer, awaited.exchange_s)
            return answer
        if given_up is None:
            return None
        self._answers_owed.append(awaited)
        awaited.give_up()
        return failed(order, given_up, NODE_UNAVAILABLE)

    def _push(self, orders: Sequence[Message]) -> tuple[dict[str, Message], dict[str, AwaitedAnswer], list[Message]]:
        """Send; returns the orders and their answers by id, and errors for those that the SuperLink did not take."""
        activated = {node.node_id: node.last_activated_at for node in self._connected_nodes()}
        accepted_ids: set[str] = set()
        for order in orders:
            # One that does not arrive whole is its node's failure: together with others it would be theirs, too.
            try:
                accepted_ids.update(self._grid.push_messages([order]))
            except ObjectPushError as error:
                log(WARNING, "the SuperLink received an incomplete message: %s", error)
        accepted = {order.metadata.message_id: order for order in orders if order.metadata.message_id in accepted_ids}
        pending = {}
        for message_id, order in accepted.items():
            node, size = order.metadata.dst_node_id, message_bytes(order)
            since = activated.get(node, "")
            pending[message_id] = AwaitedAnswer(
                self._grid, message_id, node, size, since, self._poll_s, self._turns, self._ended
            )
        reason = "the SuperLink did not take the message for its node"
        refusals = [
            failed(order, reason, NODE_UNAVAILABLE) for order in orders if order.metadata.message_id not in accepted_ids
        ]
        return accepted, pending, refusals

    def _attributed(self, reply: Message, order: Message) -> Message:
        """Return a reply as its node's own: the SuperLink's errors come from the SuperLink."""
        if not reply.has_error():
            # The reply's own word on what it answers is its sender's.
            return answer_of(order, reply)
        if reply.error.code == INVALID_FAB:
            return failed(order, error_reason(reply), reply.error.code)
        if reply.metadata.src_node_id == order.metadata.dst_node_id:
            return reply
        is_gone = reply.error.code == NODE_UNAVAILABLE
        reason = self._why_gone(order.metadata.dst_node_id) if is_gone else reply.error.reason or "no reason given"
        return failed(order, reason.strip(), reply.error.code)

    def _connected_nodes(self) -> list[Any]:
        nodes = list(self._grid.get_nodes())
        self._nodes_seen.update({node.node_id: node for node in nodes})
        return nodes

    def _why_gone(self, node_id: int) -> str:
        """Describe the end of a node's connection, as far as its last heartbeat tells."""
        seen = self._nodes_seen.get(node_id)
        if seen is None:
            return "its SuperNode is not connected: it ended, was stopped, or is cut off"
        if time.time() < seen.online_until:
            return "its SuperNode has signed off: it ended or was stopped"
        silent_s = time.time() - (seen.online_until - _PATIENCE * seen.heartbeat_interval)
        return f"its SuperNode has sent no heartbeat for {silent_s:.0f} s: it ended, was stopped, or is cut off"

    def _disconnected(self, pending: Mapping[str, AwaitedAnswer]) -> dict[str, str]:
        """Orders whose SuperNode is gone, or is not the process any more that they were sent to."""
        activated = {node.node_id: node.last_activated_at for node in self._connected_nodes()}
        reasons: dict[str, str] = {}
        for message_id, awaited in pending.items():
            node = awaited.node_id
            if node not in activated:
                reasons[message_id] = self._why_gone(node)
            elif activated[node] != awaited.activated:
                reasons[message_id] = "its SuperNode was started again, or lost contact, after the order was sent"
        return reasons

    def _settle_debts(self, nodes: Sequence[Any]) -> None:
        """Forget the owed answers that came late, or can come no more."""
        activated = {node.node_id: node.last_activated_at for node in nodes}
        for awaited in list(self._answers_owed):
            node = awaited.node_id
            if activated.get(node, awaited.activated) != awaited.activated or awaited.look(_LATE_S):
                log(INFO, "cluster %s can be asked again", self._clusters.get(node))
                self._answers_owed.remove(awaited)

    def _tell(self, missing: list[Missing]) -> None:
        if missing != self._reported:
            self._reported = missing
            self._on_wait(missing)


class _Exchange:
    """State of one exchange: overdue orders, and clusters that it waits for."""

    def __init__(
        self,
        decoder: DecoderTrainer | None,
        clusters: Mapping[int, int],
        reply_timeout_s: float,
        message_type: str,
        slowest_before_s: float | None = None,
    ) -> None:
        trains = message_type == MessageType.TRAIN
        self._decoder = decoder if trains else None
        self._clusters, self._reply_timeout_s = clusters, reply_timeout_s
        self._paced = trains and decoder is None
        self._started_at = self._last_answer_at = time.monotonic()
        self._slowest_before_s = slowest_before_s
        self.slowest_s: float | None = None
        """Longest wait for an answer of training so far [s]."""
        self._first_answer_at: float | None = None
        """Time of the first answer that is no failure [s, monotonic]; None before it."""

    def answered(self, reply: Message) -> None:
        """Note an answer; a cluster that failed has left the decoder's round."""
        now = time.monotonic()
        if not reply.has_error():
            if self._paced:
                self.slowest_s = max(self.slowest_s or 0.0, now - self._last_answer_at)
            self._first_answer_at = self._first_answer_at or now
        elif self._decoder is not None:
            cluster = self._clusters.get(reply.metadata.src_node_id, -1)
            reason = (reply.error.reason or "").strip().partition("\n")[0][:300]
            log(WARNING, "cluster %s has failed: %s", cluster, reason)
            self._decoder.current.give_up(cluster, reason)
        self._last_answer_at = now

    def overdue(self, orders: Sequence[Message]) -> dict[str, str]:
        """Reason of each order whose answer is not waited for any more, by its id."""
        now = time.monotonic()
        reasons: dict[str, str] = {}
        slowest_s = self.slowest_s or self._slowest_before_s
        if self._paced and slowest_s is not None:
            allowed_s = self._reply_timeout_s + _SLOWER * slowest_s
            if now > self._last_answer_at + allowed_s:
                reasons = {m.metadata.message_id: f"no answer {allowed_s:.0f} s after the last one" for m in orders}
        if self._decoder is None:
            return reasons
        standings = self._decoder.current.standings()
        last_sign_at = max((standing.since for standing in standings.values()), default=0.0)
        for message in orders:
            standing = standings.get(self._clusters.get(message.metadata.dst_node_id, -1))
            if standing is None:
                continue
            waited_s = now - max(standing.since, self._started_at)
            if waited_s > {"left": LAST_WORDS_S, "lost": LOST_S}.get(standing.place, math.inf):
                reasons[message.metadata.message_id] = standing.reason
            elif standing.place == "finished" and waited_s > self._reply_timeout_s:
                reasons[message.metadata.message_id] = (
                    f"its update did not come within {self._reply_timeout_s:g} s of its goodbye to the decoder; raise "
                    "decoder.reply-timeout if its network is only slow"
                )
            elif standing.place == "awaited" and now - max(last_sign_at, self._started_at) > BEGIN_S:
                reasons[message.metadata.message_id] = f"it has not begun the round within {BEGIN_S:g} s"
        return reasons

    def places(self, orders: Sequence[Message]) -> list[str]:
        """Return the place of each order's cluster in the decoder's round; empty without a decoder."""
        standings = self._decoder.current.standings() if self._decoder is not None else {}
        clusters = (self._clusters.get(message.metadata.dst_node_id, -1) for message in orders)
        return [standings[cluster].place if cluster in standings else "" for cluster in clusters]

    def missing(self, orders: Sequence[Message]) -> list[Missing]:
        """Clusters that the exchange waits for, where something is amiss with them."""
        standings = self._decoder.current.standings() if self._decoder is not None else {}
        late_clusters = []
        for message in orders:
            cluster = self._clusters.get(message.metadata.dst_node_id, -1)
            standing = standings.get(cluster)
            if standing is not None and standing.place in ("away", "left", "lost"):
                late_clusters.append(Missing(cluster, standing.reason))
            elif self._answers_are_due and not (standing and standing.place == "trains"):
                late_clusters.append(Missing(cluster, standing.reason if standing else "its answer has not come"))
            elif standing is not None and standing.place == "awaited" and self._is_late(standing, standings):
                late_clusters.append(Missing(cluster, standing.reason))
        return sorted(late_clusters)

    @property
    def _answers_are_due(self) -> bool:
        first = self._first_answer_at
        return first is not None and time.monotonic() - first > WORTH_TELLING_S

    @staticmethod
    def _is_late(standing: Standing, standings: Mapping[int, Standing]) -> bool:
        others_began = any(other.place != "awaited" for other in standings.values())
        return others_began and time.monotonic() - standing.since > WORTH_TELLING_S
