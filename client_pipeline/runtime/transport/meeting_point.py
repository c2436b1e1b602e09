"""Meeting point of a cluster's group over TLS: each member brings its address and receives all addresses.

The control unit hosts it for as long as it lives. A member sends one line of JSON, and gets one when the last member of
its generation has come::

    {"generation": 3, "size": 4, "rank": 1, "endpoint": ["10.0.0.3", 40123]}
    {"endpoints": [["10.0.0.2", 38001], ["10.0.0.3", 40123], ...], "secret": "..."}

Members of another generation wait for their own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.transport import GroupAddress

SECRET_BYTES = 16
_MOST_LINE_BYTES = 64 * 1024
_HANDSHAKE_S = 15.0
_STACK_BYTES = 1 << 20
_STARTING = threading.Lock()


@dataclass
class _Gathering:
    """The members of one generation that have come so far."""

    size: int
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES))
    endpoints: dict[int, tuple[str, int]] = field(default_factory=dict)


class MeetingPoint:
    """Listens on a free port of ``host``, and on no other address.

    Parameters
    ----------
    host : address that the devices reach
    tls : this machine's
    timeout_s : how long a member waits for the others [s]
    """

    def __init__(self, host: str, tls: NodeTls, timeout_s: float) -> None:
        listener = socket.create_server((host, 0), backlog=128, family=family_of(host))
        self.port = int(listener.getsockname()[1])
        register = _Register(timeout_s)
        start_thread(_serve, listener, tls.server_context(), register)
        self._end = weakref.finalize(self, shut, listener)

    def close(self) -> None:
        """Admit no more members."""
        self._end()


class _Register:
    """Members that have come; of two generations the later one counts."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._came = threading.Condition()
        self._gatherings: dict[int, _Gathering] = {}

    def wait_for_all(self, generation: int, size: int, rank: int, endpoint: tuple[str, int]) -> _Gathering:
        """Note a member, and wait for the others.

        Raises
        ------
        TimeoutError
            If one does not come.
        """
        with self._came:
            for past in [number for number in self._gatherings if number < generation]:
                del self._gatherings[past]
            gathering = self._gatherings.setdefault(generation, _Gathering(size))
            gathering.endpoints[rank] = endpoint
            self._came.notify_all()
            if not self._came.wait_for(lambda: len(gathering.endpoints) == gathering.size, self._timeout_s):
                raise TimeoutError(f"{len(gathering.endpoints)} of {gathering.size} members came")
            return gathering


class Meeting(NamedTuple):
    """Common knowledge of the members of a generation."""

    endpoints: list[tuple[str, int]]
    """Host and port at which each rank listens."""
    secret: bytes
    """Secret that they show each other."""


def meet(address: GroupAddress, rank: int, endpoint: tuple[str, int], tls: NodeTls) -> Meeting:
    """Come to a meeting point as one member of a generation, and wait for the others.

    Parameters
    ----------
    address : the group
    rank : of this member
    endpoint : host and port at which it listens
    tls : this machine's

    Raises
    ------
    OSError, ValueError
        If no meeting point answers, a side refuses, or the others do not come in time.
    """
    deadline = time.monotonic() + address.longest_join_s
    call = {"generation": address.generation, "size": address.size, "rank": rank, "endpoint": endpoint}
    with socket.create_connection((address.host, address.port), timeout=address.longest_join_s) as raw:
        with tls.client_context().wrap_socket(raw, server_hostname=address.host) as connection:
            connection.sendall(json.dumps(call).encode() + b"\n")
            answer = _read_line(connection, deadline)
    endpoints = [(str(host), int(port)) for host, port in answer["endpoints"]]
    return Meeting(endpoints, bytes.fromhex(answer["secret"]))


def _serve(listener: socket.socket, context: ssl.SSLContext, register: _Register) -> None:
    while True:
        try:
            raw, _ = listener.accept()
        except OSError:
            return
        start_thread(_admit, raw, context, register)


def _admit(raw: socket.socket, context: ssl.SSLContext, register: _Register) -> None:
    # A peer without proof of the cluster, or with another message, gets no answer.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), raw:
        raw.settimeout(_HANDSHAKE_S)
        with context.wrap_socket(raw, server_side=True) as connection:
            call = _read_line(connection, time.monotonic() + _HANDSHAKE_S)
            host, port = call["endpoint"]
            rank, size = int(call["rank"]), int(call["size"])
            gathering = register.wait_for_all(int(call["generation"]), size, rank, (str(host), int(port)))
            endpoints = [gathering.endpoints[rank] for rank in range(gathering.size)]
            connection.sendall(json.dumps({"endpoints": endpoints, "secret": gathering.secret}).encode() + b"\n")


def _read_line(connection: ssl.SSLSocket, deadline: float) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other members did not come in time")
        connection.settimeout(remaining_s)
        piece = connection.recv(4096)
        if not piece or len(data) > _MOST_LINE_BYTES:
            raise ConnectionError("the meeting point ended the connection")
        data += piece
    return dict(json.loads(data))


def read_bytes(connection: ssl.SSLSocket, num_bytes: int) -> bytes:
    """Read so many bytes; raises as :func:`read_into`."""
    data = bytearray(num_bytes)
    read_into(connection, memoryview(data))
    return bytes(data)


def read_into(connection: ssl.SSLSocket, view: memoryview) -> None:
    """Fill ``view``; raises ``OSError`` if the connection ends before."""
    while view:
        if not (num_read := connection.recv_into(view)):
            raise ConnectionError("the connection ended")
        view = view[num_read:]


def start_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Start a thread that ends with the process, and takes little of a device's memory, which may be limited."""
    with _STARTING:
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=function, args=arguments, daemon=True).start()
        finally:
            threading.stack_size(usual_bytes)


def shut(listener: socket.socket) -> None:
    """Close a socket that another thread waits in: it gets an error at once."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of ``host``."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
