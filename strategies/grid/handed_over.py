"""Orders that are answered at once, and collected by later messages.

Flower's simulation runs a bounded number of client apps at the same time. Clusters that train one decoder wait for each
other in every step, so more clusters than client apps could never finish a step. Here a node starts the round and
answers at once that it is under way. The same order without its weights then asks for the result, again and again.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from client_pipeline.runtime.control_unit.round_order import HandOver
from strategies.grid.forwarding import ForwardingGrid
from strategies.records import CONFIG, HAND_OVER_KEY, is_under_way


class HandedOverOrders(ForwardingGrid):
    """Passes everything on to ``grid``, training orders in several messages: for its user it is one exchange.

    Parameters
    ----------
    grid : Flower's own, or another around it
    with_weights : whether messages that ask for the result have the order's weights, which some mods of nodes read
    """

    def __init__(self, grid: Grid, *, with_weights: bool) -> None:
        super().__init__(grid)
        self.pull_interval = float(getattr(grid, "pull_interval", 1.0))
        """Interval at which it may be asked [s]."""
        self._with_weights = with_weights
        self._orders: dict[str, Message] = {}
        """Orders without their final answer, by id."""
        self._asked: dict[str, str] = {}
        """Id of the newest message of each of these orders."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        orders = list(messages)
        training = [order for order in orders if order.metadata.message_type == MessageType.TRAIN]
        for order in training:
            order.content.config_records[CONFIG][HAND_OVER_KEY] = HandOver.BEGIN
        accepted_ids = list(self._grid.push_messages(orders))
        for order in training:
            message_id = order.metadata.message_id
            if message_id in accepted_ids:
                self._orders[message_id], self._asked[message_id] = order, message_id
        return accepted_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return final answers alone; of an order that is under way the result is asked for again."""
        return [answer for message_id in message_ids for answer in self._answers(message_id)]

    def _answers(self, message_id: str) -> list[Message]:
        if (order := self._orders.get(message_id)) is None:
            return list(self._grid.pull_messages([message_id]))
        for reply in self._grid.pull_messages([self._asked[message_id]]):
            if is_under_way(reply):
                asked_ids = list(self._grid.push_messages([self._request(order)]))
                if asked_ids:
                    self._asked[message_id] = asked_ids[0]
                return []
            del self._orders[message_id], self._asked[message_id]
            return [Message(reply.error if reply.has_error() else reply.content, reply_to=order)]
        return []

    def _request(self, order: Message) -> Message:
        settings = ConfigRecord({**order.content.config_records[CONFIG], HAND_OVER_KEY: HandOver.COLLECT})
        content = RecordDict({CONFIG: settings})
        if self._with_weights:
            for name, record in order.content.array_records.items():
                content[name] = record
        metadata = order.metadata
        return Message(
            content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type, group_id=metadata.group_id
        )
