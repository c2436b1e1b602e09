"""A Grid for what Flower itself cannot put together: such a reply is one order's failure, and takes no memory.

A reply comes over the network in pieces: the message, its records, their arrays, and the chunks of each array's bytes,
which an array names by number, as often as it likes. Flower assembles them before anybody can look: a piece that does
not fit ends the whole pull with an exception, and a few kilobytes of numbers make one chunk into terabytes.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable
from logging import WARNING
from typing import Any, cast

from flwr.app import Array, Error, Message, Metadata
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from strategies.flower_internals import (
    SUPERLINK_NODE_ID,
    SYSTEM_MESSAGE_TYPE,
    ErrorCode,
    InflatableObject,
    get_object_body,
    get_object_children_ids_from_object_content,
    inflatable_utils,
    log,
    make_message,
    now,
)
from strategies.grid.forwarding import ForwardingGrid
from strategies.grid.received_values import excerpt

_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError, DecodeError)
"""What comes of pieces that do not fit; a network that fails raises others."""
_SLACK_BYTES = 1 << 20


class _Room(threading.local):
    """Bytes that the arrays of the pull in progress may still come to, in each thread; None outside of a pull."""

    def __init__(self) -> None:
        self._bytes: int | None = None

    def open(self, num_bytes: int) -> None:
        self._bytes = num_bytes

    def close(self) -> None:
        self._bytes = None

    @property
    def bytes_left(self) -> int | None:
        return self._bytes

    def take(self, num_bytes: int) -> None:
        if self._bytes is not None:
            self._bytes -= num_bytes


_room = _Room()


class BoundedArray(Array):
    """As Flower's, but put together from no more bytes than the pull in progress has room for."""

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> Array:
        """Put an array together, unless its chunks are too many."""
        bytes_left = _room.bytes_left
        if bytes_left is not None:
            ids = get_object_children_ids_from_object_content(object_content)
            sizes = {name: len(cast(Any, chunk).data) for name, chunk in (children or {}).items()}
            numbers = json.loads(get_object_body(object_content, Array).decode())["arraychunk_ids"]
            size = sum(sizes[ids[number]] for number in numbers)
            if size > bytes_left:
                raise ValueError(f"its arrays come to more than {bytes_left} bytes, which is more than was asked for")
            _room.take(size)
        return Array.inflate(object_content, children)


class SinglePulls(ForwardingGrid):
    """Passes everything on to ``grid``, and pulls replies one by one.

    A reply may have twice the bytes of the largest order (weights come back in float32 or float64), and a mebibyte.

    Parameters
    ----------
    grid : Flower's own
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.pull_interval = float(getattr(grid, "pull_interval", 1.0))
        """How often it may be asked [s]."""
        self._most_bytes = _SLACK_BYTES
        inflatable_utils.inflatable_class_registry[Array.__qualname__] = BoundedArray

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        sent = list(messages)
        sizes = [sum(record.count_bytes() for record in m.content.array_records.values()) for m in sent]
        self._most_bytes = max(self._most_bytes, *(2 * size + _SLACK_BYTES for size in sizes), 0)
        return self._grid.push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return what has come; an error for a reply that cannot be put together."""
        return [reply for message_id in message_ids for reply in self._pull(message_id)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid; what the SuperLink does not take is an error, and not waited for."""
        orders = list(messages)
        accepted_ids = set(self.push_messages(orders))
        replies = [
            _error(order.metadata.message_id, "the SuperLink did not take the message for its node")
            for order in orders
            if order.metadata.message_id not in accepted_ids
        ]
        awaited = {order.metadata.message_id for order in orders} & accepted_ids
        end = None if timeout is None else time.monotonic() + timeout
        while awaited and (end is None or time.monotonic() < end):
            came = list(self.pull_messages(sorted(awaited)))
            awaited -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
            if awaited:
                time.sleep(self.pull_interval)
        return replies

    def _pull(self, message_id: str) -> list[Message]:
        _room.open(self._most_bytes)
        try:
            replies = list(self._grid.pull_messages([message_id]))
        except _UNFIT as error:
            log(WARNING, "a reply cannot be put together: %s", excerpt(error))
            return [_error(message_id, f"its reply cannot be put together: {excerpt(error)}")]
        finally:
            _room.close()
        for reply in replies:
            # What a reply says it answers is its sender's word; this is what was asked for.
            reply.metadata.__dict__["_reply_to_message_id"] = message_id
        return replies


def _error(message_id: str, reason: str) -> Message:
    metadata = Metadata(
        run_id=0,
        message_id=uuid.uuid4().hex,
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=message_id,
        group_id="",
        created_at=now().timestamp(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
    )
    return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
