"""Replies fetched from the SuperLink piece by piece, and put together within a bound on bytes.

A reply lies at the SuperLink as a message, its records, their arrays, and the chunks of each array's bytes. An array
names its chunks by number, as often as it likes: a few kilobytes of numbers make one chunk into terabytes. Flower's own
pull joins all pieces before their sizes can be checked. Here the chunks of one array are fetched and joined at a time,
and arrays beyond 2 MiB go to disk::

    message ── records ── heads of arrays ──┬── chunks of the first array ──> file of the round
                                            └── chunks of the next one ────> file of the round
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from client_pipeline.runtime.stage.memory import give_freed_memory_back
from strategies.flower_internals import (
    ConfirmMessageReceivedRequest,
    PullAppMessagesRequest,
    get_object_body,
    get_object_head_values_from_object_content,
    make_pull_object_fn_protobuf,
    pull_objects,
)
from strategies.grid.update_spool import SMALL_BYTES, UpdateSpool, record_of

if TYPE_CHECKING:
    from strategies.flower_internals import HttpGrid

_HEADS_BYTES = 1 << 22
"""Most bytes of a reply beside the chunks of its arrays: message, records and heads of arrays."""
_FIRST_WAIT_S = 0.1
"""Wait for a piece that the node has not pushed yet [s]; Flower doubles it up to its own limit."""


def pull_replies(grid: HttpGrid, message_id: str, most_bytes: int, spool: UpdateSpool | None) -> list[Message]:
    """Return the reply to a message, if it is there.

    Parameters
    ----------
    grid : Flower's own, of a SuperLink
    message_id : of the order
    most_bytes : that the arrays of the reply may have, together
    spool : where arrays that are not small are joined; None: in memory

    Raises
    ------
    ValueError
        If the reply has more bytes; errors of pieces that are missing or do not fit are of several kinds.
    """
    client, node, run_id = grid._runtime_client, grid.node, grid.run.run_id
    response = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
    replies = []
    for head in response.messages_list:
        reply_id = head.metadata.message_id
        pieces = _Pieces(make_pull_object_fn_protobuf(client.PullObject, node, run_id), most_bytes, spool)
        try:
            replies.append(pieces.message(reply_id))
        finally:
            # The SuperLink keeps the pieces until then, also of a reply that is refused.
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=reply_id)
            )
            # Each thread that fetches has a heap of its own, which would keep the pieces.
            give_freed_memory_back()
    return replies


class _Room:
    """Number of bytes that may still be taken; several threads may."""

    def __init__(self, num_bytes: int, refusal: str) -> None:
        self.num_left = num_bytes
        self._refusal, self._lock = refusal, Lock()

    def take(self, num_bytes: int) -> None:
        """Take room for so many bytes, or raise ValueError."""
        with self._lock:
            if num_bytes > self.num_left:
                raise ValueError(self._refusal)
            self.num_left -= num_bytes


class _Pieces:
    """Pieces of one reply."""

    def __init__(self, pull: Callable[[str], bytes], most_bytes: int, spool: UpdateSpool | None) -> None:
        self._pull, self._spool = pull, spool
        self._num_kept = 0
        """Bytes of arrays that stay in memory."""
        self._too_many = f"its arrays come to more than {most_bytes} bytes, which is more than was asked for"
        self._array_room = _Room(most_bytes, self._too_many)
        self._head_room = _Room(_HEADS_BYTES, f"its records come to more than {_HEADS_BYTES} bytes beside the arrays")

    def message(self, message_id: str) -> Message:
        """Fetch and return the whole message."""
        (content,) = self._fetch([message_id], self._head_room).values()
        children = self._fetch(_child_ids(content), self._head_room)
        return Message.inflate(content, {name: self._record_dict(child) for name, child in children.items()})

    def _record_dict(self, content: bytes) -> RecordDict:
        records = self._fetch(_child_ids(content), self._head_room)
        return RecordDict.inflate(content, {name: self._record(record) for name, record in records.items()})

    def _record(self, content: bytes) -> ArrayRecord | ConfigRecord | MetricRecord:
        kind = get_object_head_values_from_object_content(content)[0]
        if kind == ArrayRecord.__qualname__:
            return self._array_record(content)
        return {cls.__qualname__: cls for cls in (ConfigRecord, MetricRecord)}[kind].inflate(content)

    def _array_record(self, content: bytes) -> ArrayRecord:
        object_ids: dict[str, str] = json.loads(get_object_body(content, ArrayRecord))
        heads = self._fetch(_child_ids(content), self._head_room)
        if set(object_ids.values()) != heads.keys():
            raise ValueError("its arrays are not those that it names")
        arrays = {object_id: self._array(head) for object_id, head in heads.items()}
        return record_of((name, arrays[object_id]) for name, object_id in object_ids.items())

    def _array(self, content: bytes) -> Array:
        description = json.loads(get_object_body(content, Array))
        # Flower's own checks, of an array that has no bytes yet.
        array = Array(description["dtype"], tuple(description["shape"]), description["stype"], b"")
        child_ids = _child_ids(content)
        chunk_ids = [child_ids[number] for number in description["arraychunk_ids"]]
        if set(chunk_ids) != set(child_ids):
            raise ValueError("its chunks are not those that it names")
        contents = self._fetch(child_ids, _Room(self._array_room.num_left, self._too_many))
        chunks = {chunk_id: _chunk_data(chunk) for chunk_id, chunk in contents.items()}
        num_bytes = sum(len(chunks[chunk_id]) for chunk_id in chunk_ids)
        self._array_room.take(num_bytes)
        parts = [chunks[chunk_id] for chunk_id in chunk_ids]
        if self._spool is not None and self._num_kept + num_bytes >= SMALL_BYTES:
            return self._spool.put_pieces(array, parts)
        self._num_kept += num_bytes
        array.data = b"".join(parts)
        return array

    def _fetch(self, object_ids: Iterable[str], room: _Room) -> dict[str, bytes]:
        """Return the content of each object by its id."""

        def pull(object_id: str) -> bytes:
            content = self._pull(object_id)
            room.take(len(content))
            return content

        return pull_objects(list(dict.fromkeys(object_ids)), pull, initial_backoff=_FIRST_WAIT_S)


def _child_ids(content: bytes) -> list[str]:
    """Return the ids of the objects that an object is put together from."""
    return get_object_head_values_from_object_content(content)[1]


def _chunk_data(content: bytes) -> memoryview:
    """Return the bytes of a chunk without a copy."""
    kind, _, num_bytes = get_object_head_values_from_object_content(content)
    if kind != "ArrayChunk" or not 0 <= num_bytes < len(content):
        raise ValueError("a chunk of its arrays is none")
    return memoryview(content)[len(content) - num_bytes :]
