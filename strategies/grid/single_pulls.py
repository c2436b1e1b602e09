"""Grid that packs small messages, and fails one order for a reply that cannot be put together or is too large.

The pieces of a reply are fetched and joined within a bound (:mod:`strategies.grid.reply_pieces`); replies of a
simulation have no pieces. The content of a reply is checked afterwards: names, types, shapes, bytes and finite numbers
(:mod:`strategies.grid.intake`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import WARNING

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from strategies.flower_internals import HttpGrid, ObjectPullError
from strategies.flower_names import MESSAGE_UNAVAILABLE, log
from strategies.grid.forwarding import ForwardingGrid
from strategies.grid.parcels import packed_messages, unpack_message
from strategies.grid.received_values import excerpt
from strategies.grid.reply_matching import answer_of, failed
from strategies.grid.reply_pieces import pull_replies
from strategies.grid.update_spool import SMALL_BYTES, UpdateSpool, data_bytes, message_bytes

_UNFIT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    DecodeError,
    ObjectPullError,
)
"""Errors of pieces that are missing or do not fit; a network that fails raises others."""
_SLACK_BYTES = 1 << 20
"""Bytes of arrays that a reply may have more than twice those of the order."""


class UnfitReply(RuntimeError):
    """A reply cannot be put together; the message says why."""


class SinglePulls(ForwardingGrid):
    """Passes everything on to ``grid``, small messages as one record, and pulls replies one by one.

    The arrays of a reply may have twice the bytes of the largest order (weights come back in float32 or float64), and a
    mebibyte.

    Parameters
    ----------
    grid : Flower's own
    spool : where the large arrays of a reply wait, before the next reply is pulled; None: in memory
    """

    def __init__(self, grid: Grid, spool: UpdateSpool | None = None) -> None:
        super().__init__(grid)
        self._spool = spool
        self.pull_interval = float(getattr(grid, "pull_interval", 1.0))
        """Interval at which it may be asked [s]."""
        self._most_bytes = _SLACK_BYTES

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        orders = list(messages)
        self._most_bytes = max(self._most_bytes, *(2 * message_bytes(order) + _SLACK_BYTES for order in orders), 0)
        return self._grid.push_messages(packed_messages(orders))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there.

        Raises
        ------
        UnfitReply
            For one that cannot be put together; the next pull goes without it.
        """
        return [reply for message_id in message_ids for reply in self._pull(message_id)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid; an order that the SuperLink does not take fails at once."""
        orders = list(messages)
        accepted_ids = set(self.push_messages(orders))
        awaited = {order.metadata.message_id: order for order in orders if order.metadata.message_id in accepted_ids}
        replies = [
            failed(order, "the SuperLink did not take the message for its node", MESSAGE_UNAVAILABLE)
            for order in orders
            if order.metadata.message_id not in awaited
        ]
        end = None if timeout is None else time.monotonic() + timeout
        while awaited and (end is None or time.monotonic() < end):
            for message_id, order in list(awaited.items()):
                try:
                    answers = [answer_of(order, reply) for reply in self._pull(message_id)]
                except UnfitReply as error:
                    answers = [failed(order, str(error), MESSAGE_UNAVAILABLE)]
                if answers:
                    replies += answers
                    del awaited[message_id]
            if awaited:
                time.sleep(self.pull_interval)
        return replies

    def _pull(self, message_id: str) -> list[Message]:
        try:
            if isinstance(self._grid, HttpGrid):
                replies = pull_replies(self._grid, message_id, self._most_bytes, self._spool)
            else:
                replies = list(self._grid.pull_messages([message_id]))
            for reply in replies:
                unpack_message(reply)
        except _UNFIT as error:
            reason = f"{type(error).__name__}: {excerpt(error)}"
            log(WARNING, "a reply cannot be put together: %s", reason)
            raise UnfitReply(f"its reply cannot be put together: {reason}") from error
        if self._spool is not None:
            for reply in replies:
                _put_aside(reply, self._spool)
        return replies


def _put_aside(reply: Message, spool: UpdateSpool) -> None:
    """Write the large arrays of a reply to disk: many clusters may answer before one answer is taken in."""
    if reply.has_error():
        return
    for record in reply.content.array_records.values():
        for name, array in record.items():
            if data_bytes(array) >= SMALL_BYTES:
                record[name] = spool.put_aside(array)
