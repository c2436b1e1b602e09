"""A Grid around any strategy: counts bytes and time, keeps the reports, fails a round in which all clients failed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any, cast

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from client_pipeline.link.update_codec import UpdateCodec
from strategies.flower_names import log
from strategies.grid.forwarding import ForwardingGrid
from strategies.grid.intake import ReplyIntake, RoundBounds, TakenReply
from strategies.grid.reply_matching import match_replies, matches
from strategies.grid.update_receipts import UpdateReceipts
from strategies.grid.update_spool import UpdateSpool, message_bytes
from strategies.records import CONFIG, ROUND_KEY


class RoundFailed(RuntimeError):
    """No client finished the round; the message gives each one's reason."""


class RecordingGrid(ForwardingGrid):
    """Passes everything on to ``grid``, for the nodes of this run alone.

    Parameters
    ----------
    grid : Flower's own
    clusters : cluster index of each node id; other nodes stay hidden from the strategy
    all_needed_s : how long to wait for a node that is gone, for strategies that need all; None for those that go on
        without it. Flower's own wait has no end.
    codec : of the control units' updates; the strategy gets trained weights. None: these are what is sent.
    bounds : what the run's configuration says of every honest reply
    borne : rounds in a row that may pass without any client's answer, once there was one
    count_bytes : whether weights that go up and down count; they do not where they travel for evaluation alone
    on_train : called with the round and its clusters before these are asked to train
    spool : where large updates wait for each other; None: in the machine's folder for temporary files
    """

    def __init__(
        self,
        grid: Grid,
        clusters: Mapping[int, int],
        all_needed_s: float | None = None,
        *,
        codec: UpdateCodec | None = None,
        bounds: RoundBounds | None = None,
        borne: int = 0,
        count_bytes: bool = True,
        on_train: Callable[[int, list[int]], None] | None = None,
        spool: UpdateSpool | None = None,
    ) -> None:
        super().__init__(grid)
        self._clusters = dict(clusters)
        self._all_needed_s = all_needed_s
        self._spool = spool if spool is not None else UpdateSpool()
        self._intake = ReplyIntake(clusters, codec, bounds, self._spool)
        self._compressed = codec is not None
        self.receipts = UpdateReceipts(clusters.values())
        """Record of the updates that counted; control units receive it where updates are compressed."""
        self._borne = borne
        self._num_empty_rounds: int | None = None
        """Rounds in a row without an answer; None before the first answer."""
        self._count_bytes = count_bytes
        self._on_train = on_train
        self._passed_on: list[Message] = []
        """The replies of the last training exchange, as the strategy got them."""
        self.last_reports: list[dict[str, Any]] = []
        """The control units' reports of the last training exchange."""
        self.last_round: dict[str, Any] = {}
        """Last training exchange: ``train_loss``, ``messages_s``, ``bytes_down``, ``bytes_up``, ``clusters``
        (the control units' reports), ``failed`` and ``faults``."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the run's nodes that are connected, in the order of their clusters.

        Raises
        ------
        RoundFailed
            If all are needed and one stays away for too long; the message names its cluster.
        """
        deadline = time.monotonic() + (self._all_needed_s or 0.0)
        while True:
            present = set(self._grid.get_node_ids())
            missing = sorted(cluster for node, cluster in self._clusters.items() if node not in present)
            if not missing or self._all_needed_s is None:
                return [node for node in sorted(self._clusters, key=self._clusters.__getitem__) if node in present]
            if time.monotonic() > deadline:
                raise RoundFailed(f"clusters {missing} have not been connected for {self._all_needed_s:g} s")
            time.sleep(0.5)

    def get_nodes(self) -> Iterable[Any]:
        """See Grid."""
        return (node for node in self._grid.get_nodes() if node.node_id in self._clusters)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange messages; replies come in the order of the clusters, so that sums repeat bit for bit.

        Each is checked and put aside as it comes. The list that a training exchange returned is emptied when the next
        one begins: Flower's ``start`` has it until then, and with it the last round's updates.

        Raises
        ------
        RoundFailed
            If this was a training exchange and no reply came without an error.
        SpoolError
            If the updates cannot be put aside.
        """
        orders = list(messages)
        if not orders or orders[0].metadata.message_type != MessageType.TRAIN:
            answers = match_replies(orders, self._grid.send_and_receive(orders, timeout=timeout)) if orders else []
            return [answer for place in self._places(orders) if (answer := answers[place]) is not None]
        number = _round_of(orders)
        if self._on_train is not None:
            self._on_train(number, [self._clusters[_node(order)] for order in orders])
        if self._compressed:
            self.receipts.tell(orders)
        self._passed_on.clear()
        self._spool.begin_round()
        start, bytes_up = time.perf_counter(), 0
        taken: dict[int, TakenReply] = {}
        for place, reply in matches(orders, self._grid.send_and_receive(orders, timeout=timeout)):
            bytes_up += 0 if reply.has_error() else self._bytes([reply])
            taken[place] = self._intake.take(orders[place], reply)
            # The next one is not waited for with this one in memory.
            del reply
        seconds = time.perf_counter() - start
        ordered = [taken.get(place) or self._intake.take(orders[place], None) for place in self._places(orders)]
        self.receipts.note(number, [reply.cluster for reply in ordered if reply.reason is None])
        self._record(number, ordered, seconds, self._bytes(orders), bytes_up)
        self._passed_on = [reply.message for reply in ordered]
        return self._passed_on

    def _places(self, orders: Sequence[Message]) -> list[int]:
        """Places of the orders, in the order of their clusters."""
        return sorted(range(len(orders)), key=lambda place: self._clusters.get(_node(orders[place]), -1))

    def take_round(self) -> dict[str, Any]:
        """Return the record of the last training exchange, once."""
        record, self.last_round = self.last_round, {}
        return record

    def _record(
        self, number: int, replies: Sequence[TakenReply], seconds: float, bytes_down: int, bytes_up: int
    ) -> None:
        good_replies = [reply for reply in replies if reply.reason is None]
        reasons = {reply.cluster: reply.reason for reply in replies if reply.reason is not None}
        faults = [fault for reply in replies for fault in reply.faults]
        weight = sum(reply.weight for reply in good_replies)
        self.last_reports = [reply.report for reply in good_replies]
        self.last_round = {
            "train_loss": sum(reply.loss * reply.weight for reply in good_replies) / weight
            if good_replies
            else math.nan,
            "weight": weight,
            "messages_s": seconds,
            "bytes_down": bytes_down,
            "bytes_up": bytes_up,
            "clusters": self.last_reports,
            "failed": [{"cluster": cluster, "reason": reason} for cluster, reason in sorted(reasons.items())],
            "faults": faults,
        }
        for fault in faults:
            log(WARNING, "round %d: %s", number, fault_text(fault))
        if good_replies:
            self._num_empty_rounds = 0
            return
        listed = "; ".join(f"cluster {cluster}: {reason}" for cluster, reason in sorted(reasons.items()))
        if self._num_empty_rounds is None or self._num_empty_rounds >= self._borne:
            raise RoundFailed(f"round {number}: every client failed: {listed}")
        self._num_empty_rounds += 1
        log(WARNING, "round %d: every client failed, the model is unchanged: %s", number, listed)

    def _bytes(self, messages: list[Message]) -> int:
        return sum(message_bytes(message) for message in messages) if self._count_bytes else 0


def fault_text(fault: Mapping[str, Any]) -> str:
    """A fault in words, for the log."""
    place = "".join(f", {name} {fault[name]}" for name in ("cluster", "device") if fault.get(name) is not None)
    end = "the round was lost"
    if fault.get("recovered"):
        seconds = fault.get("seconds")
        end = "the round went on" if seconds is None else f"the round went on after {seconds:.1f} s"
    return f"fault ({fault.get('kind')}{place}, step {fault.get('step')}): {end}: {fault.get('reason', '')}"


def _node(order: Message) -> int:
    return int(order.metadata.dst_node_id)


def _round_of(orders: list[Message]) -> int:
    return int(cast(int, orders[0].content.config_records[CONFIG][ROUND_KEY]))
