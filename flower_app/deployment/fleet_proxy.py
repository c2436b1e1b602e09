"""Reverse proxy of the server: SuperNodes reach the Fleet API alone, and push a bounded number of bytes and pieces.

Flower serves three APIs at one port: Fleet (SuperNodes, by their keys), Control (runs and the register of nodes) and
Runtime (server apps). The latter two authenticate nobody. So the SuperLink listens on the loopback, and
``python -m flower_app.deployment.fleet_proxy HOST:PORT CONTROL_HOST:PORT CERTIFICATE KEY AUTHORITY REPLY_MB`` is what
the network reaches.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from client_pipeline.link.hosts import split_address
from flower_app.deployment.reverse_proxy import Answer, Bounds, Refusal, Request, ReverseProxy, client_tls, server_tls

HEALTH = "/health"
_FLEET = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")
_PULL_MESSAGES, _PULL_OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/pull-object"
_PUSH_MESSAGES, _PUSH_OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
_PUBLIC_KEY = b"flwr-public-key"
_NO_MESSAGE, _NO_PIECE_YET = b"", b"\x08\x01"
"""Bodies of the answers that there is no message, and that a piece is known and has not come."""
HELD_S, _LOOK_S = 20.0, 0.5
"""Time for which an empty answer is held back, and interval of the questions to the SuperLink meanwhile [s]."""
_PIECE_HELD_S, _PIECE_LOOK_S = 5.0, 0.1
_IDLE_S, _IDLE_LOOK_S = 60.0, 2.0
"""Time without a message after which a node is idle, and the longer interval then: a question costs 10 ms [s]."""
_LEAST_LIST_BYTES, _REPLY_PER_LIST = 512 * 1024, 2**13
"""Most bytes of the lists of a reply's pieces, and the part of its bytes that they may be, if that is more.

The SuperLink locks its database for some milliseconds for each piece. A piece takes 68 bytes of the list, so a reply
of 4096 MB in 1,100 arrays takes 200 KiB.
"""
_NODES = 2048
"""Most entries by key, of which a node has one for each path."""


class FleetProxy(ReverseProxy):
    """Proxy that admits requests of SuperNodes, and counts what each pushes for one order.

    Parameters
    ----------
    reply_bytes : most bytes that a node may push between two orders
    options : those of :class:`ReverseProxy`
    """

    def __init__(self, reply_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._most = {
            _PUSH_MESSAGES: max(_LEAST_LIST_BYTES, reply_bytes // _REPLY_PER_LIST),
            _PUSH_OBJECT: reply_bytes,
        }
        self._pushed: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        """Bytes that the SuperLink has taken since the last order, by path and the key that it has verified."""
        self._underway: Counter[tuple[str, str, bytes]] = Counter()
        """Bytes on their way by address, too: a stranger with another node's key takes nothing from its owner."""
        self._had_order_at: OrderedDict[bytes, float] = OrderedDict()

    def admit(self, request: Request) -> None:
        """See ReverseProxy."""
        if (request.method, request.path) == ("GET", HEALTH):
            return
        if request.method != "POST" or not _FLEET.fullmatch(request.path):
            raise Refusal(403, "This port is for SuperNodes. Runs are started on the edge server itself.")
        if most := self._most.get(request.path):
            place = request.path, request.header(_PUBLIC_KEY)
            counted = self._pushed.get(place, 0) + self._underway[request.peer, *place] + request.length
            if counted > most:
                what = "answer to one order has" if request.path == _PUSH_OBJECT else "list of an answer's pieces takes"
                raise Refusal(
                    413,
                    f"the {what} {counted} bytes or more; expected at most {most}; a larger --reply-mb of collapipe up "
                    "edge-server raises it",
                )
            self._underway[request.peer, *place] += request.length

    def done(self, request: Request, status: int) -> None:
        """See ReverseProxy."""
        if request.path not in self._most:
            return
        place = request.path, request.header(_PUBLIC_KEY)
        self._underway[request.peer, *place] -= request.length
        self._underway += Counter()
        # Only the owner of a key gets this answer.
        if status == 200:
            _note(self._pushed, place, self._pushed.get(place, 0) + request.length)

    def is_looked_at(self, request: Request) -> bool:
        """See ReverseProxy."""
        return request.path in (_PULL_MESSAGES, _PULL_OBJECT)

    async def look(self, request: Request, answer: Answer, ask_again: Callable[[], Awaitable[Answer]]) -> Answer:
        """Hold an empty answer back for a while: Flower's SuperNode asks every three seconds, and begins late."""
        is_piece = request.path == _PULL_OBJECT
        empty, held_s = (_NO_PIECE_YET, _PIECE_HELD_S) if is_piece else (_NO_MESSAGE, HELD_S)
        key, deadline = request.header(_PUBLIC_KEY), time.monotonic() + held_s
        if key not in self._had_order_at:
            _note(self._had_order_at, key, time.monotonic())
        while answer.status == 200 and answer.body == empty and time.monotonic() < deadline:
            is_idle = time.monotonic() - self._had_order_at.get(key, 0.0) > _IDLE_S
            await asyncio.sleep(_PIECE_LOOK_S if is_piece else _IDLE_LOOK_S if is_idle else _LOOK_S)
            answer = await ask_again()
        if answer.status == 200 and answer.body != empty and not is_piece:
            _note(self._had_order_at, key, time.monotonic())
            for path in self._most:
                self._pushed.pop((path, key), None)
        return answer


def _note(by_key: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    by_key[key] = value
    by_key.move_to_end(key)
    if len(by_key) > _NODES:
        by_key.popitem(last=False)


def main() -> None:
    """Serve until told to end."""
    address, behind, certificate, key, authority, reply_mb = sys.argv[1:]
    proxy = FleetProxy(
        int(reply_mb) * 10**6,
        behind=split_address("fleet_proxy", behind),
        behind_tls=client_tls(authority),
        tls=server_tls(certificate, key),
        bounds=Bounds(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    asyncio.run(proxy.serve(split_address("fleet_proxy", address)))


if __name__ == "__main__":
    main()
