"""A Grid for what Flower itself cannot put together: such a reply is one order's failure, and takes no memory.

A reply comes over the network in pieces: the message, its records, their arrays, and the chunks of each array's bytes,
which an array names by number, as often as it likes. Flower assembles them before anybody can look: a piece that does
not fit ends the whole pull with an exception, and a few kilobytes of numbers make one chunk into terabytes.

An array that is not small is put together on disk (:mod:`strategies.grid.update_spool`): a pull holds the pieces of one
reply, and when it ends none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from logging import WARNING
from typing import Any, cast

from flwr.app import Array, ArrayRecord, Error, Message, Metadata
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from client_pipeline.runtime.memory import give_freed_memory_back
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
from strategies.grid.parcels import packed_messages, unpack_message
from strategies.grid.piece_waits import look_again_soon
from strategies.grid.received_values import excerpt
from strategies.grid.update_spool import SMALL_BYTES, SpooledArray, UpdateSpool, record_bytes

_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError, DecodeError)
"""What comes of pieces that do not fit; a network that fails raises others."""
_SLACK_BYTES = 1 << 20


class _Pull(threading.local):
    """The pull in progress, in each thread."""

    def __init__(self) -> None:
        self.bytes_left: int | None = None
        """What the reply's arrays may still come to; None outside of a pull."""
        self.spool: UpdateSpool | None = None
        """Where its arrays go; None: all into memory."""
        self.has_spooled = False
        """Whether one went there."""

    def begin(self, num_bytes: int, spool: UpdateSpool | None) -> None:
        self.bytes_left, self.spool, self.has_spooled = num_bytes, spool, False

    def end(self) -> None:
        self.bytes_left = self.spool = None

    def take(self, num_bytes: int) -> None:
        """Take room for an array.

        Raises
        ------
        ValueError
            If the reply's arrays come to more than was asked for.
        """
        if self.bytes_left is None:
            return
        if num_bytes > self.bytes_left:
            raise ValueError(f"its arrays come to more than {self.bytes_left} bytes, which is more than was asked for")
        self.bytes_left -= num_bytes


_pull = _Pull()


class BoundedArray(Array):
    """As Flower's, but put together from no more bytes than the pull in progress has room for, and on disk if large."""

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> Array:
        """Put an array together, unless its chunks are too many."""
        if _pull.bytes_left is None:
            return Array.inflate(object_content, children)
        ids = get_object_children_ids_from_object_content(object_content)
        pieces: dict[str, Any] = {name: cast(Any, chunk).data for name, chunk in (children or {}).items()}
        description = json.loads(get_object_body(object_content, Array).decode())
        names = [ids[number] for number in description["arraychunk_ids"]]
        size = sum(len(pieces[name]) for name in names)
        _pull.take(size)
        if _pull.spool is None or size < SMALL_BYTES:
            return Array.inflate(object_content, children)
        # Flower's own checks, of an array that has no bytes yet.
        hollow = Array(description["dtype"], tuple(description["shape"]), description["stype"], b"")
        if set(names) != pieces.keys():
            raise ValueError("its chunks are not those that it names")
        _pull.has_spooled = True
        return _pull.spool.put_pieces(hollow.dtype, hollow.shape, hollow.stype, [pieces[name] for name in names])


class BoundedRecord(ArrayRecord):
    """As Flower's, which would read every array back into memory."""

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> ArrayRecord:
        """Put a record of arrays together, of which some may be on disk."""
        spooled = {name: child for name, child in (children or {}).items() if isinstance(child, SpooledArray)}
        if not spooled:
            return ArrayRecord.inflate(object_content, children)
        # Flower's own checks, of arrays that have no bytes.
        hollow = {name: Array(child.dtype, child.shape, child.stype, b"") for name, child in spooled.items()}
        record = ArrayRecord.inflate(object_content, {**(children or {}), **hollow})
        names: dict[str, str] = json.loads(get_object_body(object_content, ArrayRecord).decode())
        for name, object_id in names.items():
            if object_id in spooled:
                record[name] = spooled[object_id]
        return record


class SinglePulls(ForwardingGrid):
    """Passes everything on to ``grid``, small messages as one record, and pulls replies one by one.

    A reply's arrays may have twice the bytes of the largest order (weights come back in float32 or float64), and a
    mebibyte; those of a small message have a limit of their own.

    Parameters
    ----------
    grid : Flower's own
    spool : where a reply's large arrays are put together; None: in memory
    """

    def __init__(self, grid: Grid, spool: UpdateSpool | None = None) -> None:
        super().__init__(grid)
        self._spool = spool
        self.pull_interval = float(getattr(grid, "pull_interval", 1.0))
        """How often it may be asked [s]."""
        self._most_bytes = _SLACK_BYTES
        inflatable_utils.inflatable_class_registry[Array.__qualname__] = BoundedArray
        inflatable_utils.inflatable_class_registry[ArrayRecord.__qualname__] = BoundedRecord
        look_again_soon(sys.modules[type(grid).__module__], "pull_objects")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        sent = list(messages)
        sizes = [sum(record_bytes(record) for record in m.content.array_records.values()) for m in sent]
        self._most_bytes = max(self._most_bytes, *(2 * size + _SLACK_BYTES for size in sizes), 0)
        return self._grid.push_messages(packed_messages(sent))

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
        _pull.begin(self._most_bytes, self._spool)
        try:
            replies = list(self._grid.pull_messages([message_id]))
            for reply in replies:
                unpack_message(reply)
        except _UNFIT as error:
            log(WARNING, "a reply cannot be put together: %s", excerpt(error))
            return [_error(message_id, f"its reply cannot be put together: {excerpt(error)}")]
        finally:
            has_spooled = _pull.has_spooled
            _pull.end()
        for reply in replies:
            # What a reply says it answers is its sender's word; this is what was asked for.
            reply.metadata.__dict__["_reply_to_message_id"] = message_id
        if has_spooled:
            # Threads that fetch have heaps of their own, each of which would keep a reply's pieces.
            give_freed_memory_back()
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
