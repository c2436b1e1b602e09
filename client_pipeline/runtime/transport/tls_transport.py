"""Tensors between the stages of one cluster over TLS, where its machines have certificates.

torch's gloo cannot encrypt. Here each member listens at its own address, and connects to its neighbours with a
certificate at both ends::

    connection, one way only     16 bytes of the group's secret, rank and direction; then tensors
    tensor                       tag (8 bytes), number of bytes (8), the bytes
    flush                        a tag that no tensor has; answered by one byte when all before it has been read

A connection carries tensors one way, so that one thread at each end uses it, as TLS needs.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import ssl
import struct
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial

import torch
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.runtime.transport.meeting_point import (
    SECRET_BYTES,
    Meeting,
    family_of,
    meet,
    read_bytes,
    read_into,
    shut,
    start_thread,
)
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.tensor_mailbox import TensorKey, TensorMailbox
from client_pipeline.runtime.transport.transport import (
    BACKWARD,
    FORWARD,
    GroupAddress,
    Receive,
    TransportError,
    member_address,
    receive_activity,
)

_HELLO = struct.Struct(f"!{SECRET_BYTES}sIB")
_HEADER = struct.Struct("!QQ")
_FLUSH = 2**64 - 1
_LEAST_DIAL_S = 1.0
"""Time for a connection after the members have met [s]."""


class _Outgoing:
    """Connection to one peer in one direction, with the thread that writes to it."""

    def __init__(self, connection: ssl.SSLSocket, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self._orders: queue.SimpleQueue[tuple[int, Tensor] | None] = queue.SimpleQueue()
        self._sent = threading.Condition()
        self._num_pending = 0
        self._is_flushed = True
        self._error = ""
        start_thread(self._write)

    def send(self, tag: int, tensor: Tensor) -> None:
        with self._sent:
            if self._error:
                raise TransportError(self._error)
            self._num_pending += 1
            self._is_flushed = False
        self._orders.put((tag, tensor))

    def flush(self) -> None:
        with self._sent:
            if not self._is_flushed:
                self._is_flushed = True
                self._num_pending += 1
                self._orders.put((_FLUSH, torch.empty(0)))
            if not self._sent.wait_for(lambda: not self._num_pending or bool(self._error), self._timeout_s):
                raise TransportError(f"sending: it did not end in {self._timeout_s:g} s")
            if self._error:
                raise TransportError(f"sending: {self._error}")

    def close(self) -> None:
        self._orders.put(None)
        _hang_up(self._connection)

    def _write(self) -> None:
        try:
            with self._connection as connection:
                while (order := self._orders.get()) is not None:
                    tag, tensor = order
                    view = _bytes_of(tensor)
                    connection.sendall(_HEADER.pack(tag, len(view)))
                    connection.sendall(view)
                    if tag == _FLUSH:
                        read_bytes(connection, 1)
                    with self._sent:
                        self._num_pending -= 1
                        self._sent.notify_all()
        except (OSError, ValueError) as error:
            with self._sent:
                self._error = f"the connection is cut: {error}"
                self._sent.notify_all()


class TlsTransport:
    """One member of a cluster's group; used as :class:`GlooTransport` is.

    Parameters
    ----------
    address : the group
    rank : of this member
    tls : this machine's

    Raises
    ------
    TransportError
        If a member does not come in time, or cannot prove that it is of this cluster.
    """

    def __init__(self, address: GroupAddress, rank: int, tls: NodeTls) -> None:
        self.rank = rank
        self.generation = address.generation
        self.size = address.size
        self.codec = ActivationCodec(address.codec)
        self._timeout_s = address.timeout_s
        self._deadline = time.monotonic() + address.longest_join_s
        self._client, self._server = tls.client_context(), tls.server_context()
        self._mailbox = TensorMailbox(address.timeout_s)
        self._meeting: Future[Meeting] = Future()
        self._dialing = threading.Lock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}
        self._incoming: set[ssl.SSLSocket] = set()
        host = tls.host or member_address(address)
        self._listener = socket.create_server((host, 0), backlog=128, family=family_of(host))
        start_thread(self._accept)
        endpoint = (host, int(self._listener.getsockname()[1]))
        try:
            self._meeting.set_result(meet(address, rank, endpoint, tls))
            # Its neighbours in the ring, at once: a peer that ends is noticed by the connection that ends with it.
            self._connect((rank + 1) % self.size, FORWARD)
            self._connect((rank - 1) % self.size, BACKWARD)
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise TransportError(f"meeting the cluster's group at {address.host}:{address.port}: {error}") from error

    def send(self, tensor: Tensor, peer: int, direction: int, micro_batch: int) -> None:
        """Start sending; returns at once."""
        tensor = self.codec.encode(tensor.detach()).contiguous()
        try:
            self._connect(peer, direction).send(micro_batch, tensor)
        except (OSError, TransportError) as error:
            raise TransportError(f"sending micro-batch {micro_batch} to rank {peer}: {error}") from error

    def receive(
        self, shape: tuple[int, ...], peer: int, direction: int, micro_batch: int, activity: str = ""
    ) -> Receive:
        """Post a receive of float32 of ``shape``; ``wait`` on what it returns."""
        activity = activity or receive_activity(direction, micro_batch, peer)
        key = TensorKey(peer, direction, micro_batch)
        wire_shape, dtype = self.codec.wire(shape)
        posted = self._mailbox.post(key, torch.empty(wire_shape, dtype=dtype))
        return Receive(partial(self._mailbox.take, key, posted), activity, self.codec)

    def flush(self) -> None:
        """Wait until the peers have read all that was sent."""
        with self._lock:
            connections = list(self._outgoing.values())
        for connection in connections:
            connection.flush()

    def close(self) -> None:
        """Leave the group; waits here, in other threads or at a neighbour, fail at once."""
        with self._lock:
            self._is_closed = True
            outgoing, incoming = list(self._outgoing.values()), list(self._incoming)
        self._mailbox.close()
        self._meeting.cancel()
        shut(self._listener)
        for connection in outgoing:
            connection.close()
        for incoming_connection in incoming:
            _hang_up(incoming_connection)

    def _connect(self, peer: int, direction: int) -> _Outgoing:
        """The connection to a peer; made when it is first needed."""
        # Not under the lock that a caller's thread needs: two members may be calling each other.
        with self._dialing:
            with self._lock:
                self._check_open()
                if (peer, direction) in self._outgoing:
                    return self._outgoing[peer, direction]
            meeting = self._meeting.result()
            host, port = meeting.endpoints[peer]
            remaining_s = max(self._deadline - time.monotonic(), _LEAST_DIAL_S)
            with socket.create_connection((host, port), timeout=remaining_s) as raw:
                connection = self._client.wrap_socket(raw, server_hostname=host)
            connection.sendall(_HELLO.pack(meeting.secret, self.rank, direction))
            _settle(connection)
            with self._lock:
                try:
                    self._check_open()
                except TransportError:
                    connection.close()
                    raise
                outgoing = _Outgoing(connection, self._timeout_s)
                self._outgoing[peer, direction] = outgoing
            return outgoing

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("this member has left the group")

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            start_thread(self._admit, raw)

    def _admit(self, raw: socket.socket) -> None:
        """Take what one peer sends in one direction, for as long as the connection lasts."""
        raw.settimeout(max(self._deadline - time.monotonic(), _LEAST_DIAL_S))
        sender: tuple[int, int] | None = None
        try:
            with self._server.wrap_socket(raw, server_side=True, do_handshake_on_connect=False) as connection:
                with self._lock:
                    if self._is_closed:
                        return
                    self._incoming.add(connection)
                connection.do_handshake()
                secret, peer, direction = _HELLO.unpack(read_bytes(connection, _HELLO.size))
                # A neighbour may have been told of all a moment before this member is.
                if not hmac.compare_digest(secret, self._meeting.result(self._timeout_s).secret):
                    return
                sender = (peer, direction)
                _settle(connection)
                self._read(connection, peer, direction)
        except (OSError, ValueError, CancelledError, RuntimeError) as error:
            # Before it has named its member, the peer is unknown.
            if sender is not None:
                self._mailbox.lose(*sender, f"rank {sender[0]} has left, or is gone: {error}")

    def _read(self, connection: ssl.SSLSocket, peer: int, direction: int) -> None:
        while True:
            tag, num_bytes = _HEADER.unpack(read_bytes(connection, _HEADER.size))
            if tag == _FLUSH:
                connection.sendall(b"\0")
                continue
            key = TensorKey(peer, direction, tag)
            tensor = self._mailbox.place_for(key, num_bytes)
            read_into(connection, _bytes_of(tensor))
            self._mailbox.arrived(key, tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


def _settle(connection: ssl.SSLSocket) -> None:
    """From now on a peer may take its time, and nothing waits to be sent with the next."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(connection: ssl.SSLSocket) -> None:
    """End a connection that another thread uses, which gets an error at once, and closes it.

    The socket's own method: that of :class:`ssl.SSLSocket` lets go of TLS first, and what that thread writes next would
    leave in plain text.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
