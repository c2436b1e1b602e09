"""Replies matched to messages, by the message's id and not by the sender that the reply names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from logging import WARNING

from flwr.app import Error, Message

from strategies.flower_names import INVALID_FAB, MOD_FAILED_PRECONDITION, log

_FOREIGN_APP = (
    "its control unit does not run this run's app: its release is another one; install the same release on the server "
    "and all control units, or read the app's code and start the control unit with collapipe join --allow-app DIGEST; "
    "its log names both digests"
)


def error_reason(reply: Message) -> str:
    """Return the reason of an error; of an app that was refused, with the remedy."""
    return _FOREIGN_APP if reply.error.code == INVALID_FAB else str(reply.error.reason)


def match_replies(orders: Sequence[Message], replies: Iterable[Message]) -> list[Message | None]:
    """Return each order's reply, None for one without, in the orders' order.

    The SuperLink answers for a node that is gone, and then the sender is the SuperLink. What a client says its node is
    proves nothing. An order's error, and a reply that names another sender, come back as the asked node's own. Replies
    to no order, and any but the first to one, are left out and logged.

    Parameters
    ----------
    orders : messages to nodes, after they were sent; those without an id (sent in another form) are known by node
    replies : what came back
    """
    answers: list[Message | None] = [None] * len(orders)
    for place, answer in matches(orders, replies):
        answers[place] = answer
    return answers


def matches(orders: Sequence[Message], replies: Iterable[Message]) -> Iterator[tuple[int, Message]]:
    """Yield the place of an order and its reply, as replies come; none is kept. See :func:`match_replies`."""
    place_of: dict[str | int, int] = {}
    answered: set[int] = set()
    for reply in replies:
        # Orders get their ids when they are sent.
        place_of = place_of or {o.metadata.message_id or o.metadata.dst_node_id: n for n, o in enumerate(orders)}
        key = reply.metadata.reply_to_message_id or reply.metadata.src_node_id
        place = place_of.get(key)
        if place is None or place in answered:
            excess = "an order that was not given" if place is None else "an order that has its answer"
            log(WARNING, "a reply to %s is left out", excess)
            continue
        answered.add(place)
        yield place, answer_of(orders[place], reply)
        # The next one is not waited for with this one in memory.
        del reply


def note_exchange(reply: Message, seconds: float) -> None:
    """Note on a reply how long it took from its order on, by this process's clock; no client can say that."""
    reply.metadata.__dict__["_exchange_s"] = seconds


def exchange_seconds(reply: Message) -> float | None:
    """Return what :func:`note_exchange` noted; None if it did not [s]."""
    return reply.metadata.__dict__.get("_exchange_s")


def failed(order: Message, reason: str, code: int = MOD_FAILED_PRECONDITION) -> Message:
    """Return the error that stands for an order's answer."""
    return Message(Error(code, reason), reply_to=order)


def answer_of(order: Message, reply: Message) -> Message:
    """Return a reply as the asked node's own answer to an order, whatever the reply says of itself."""
    metadata = reply.metadata
    if (metadata.src_node_id, metadata.reply_to_message_id) == (order.metadata.dst_node_id, order.metadata.message_id):
        return reply
    if reply.has_error():
        return failed(order, str(reply.error.reason), reply.error.code)
    return Message(reply.content, reply_to=order)
