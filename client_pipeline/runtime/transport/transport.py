"""Tensors between the stages of one cluster: point-to-point gloo between its processes, or TLS between its machines.

Rank 0 is the control unit, rank s + 1 is stage s; ranks that share a process, as in a simulation, are one member of the
gloo group (``shared_process``). A group belongs to one plan: when the stages change, every
member builds the next generation (tens of milliseconds) and the old one closes. A peer that dies raises at once, one
that freezes at the timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.hosts import is_loopback

FORWARD, BACKWARD = 0, 1

_UNUSED_TAG = 2**30
"""No micro-batch has it."""


class TransportError(RuntimeError):
    """A neighbour in the pipeline is gone or silent."""


@dataclass(frozen=True)
class Receive:
    """A posted receive.

    Parameters
    ----------
    take : waits for the tensor in the codec's form; raises ``RuntimeError``
    activity : description of the wait, for messages
    codec : codec of the tensor
    """

    take: Callable[[], Tensor]
    activity: str
    codec: ActivationCodec

    def wait(self) -> Tensor:
        """Wait for the tensor.

        Raises
        ------
        TransportError
            If the peer closed or stayed silent for the group's timeout.
        """
        try:
            wire = self.take()
        except RuntimeError as error:
            raise TransportError(f"{self.activity}: {error}") from error
        return self.codec.decode(wire)


class Transport(Protocol):
    """One rank's place in a cluster's group. A tensor that was sent must not be written to any more."""

    rank: int
    generation: int
    size: int
    """Ranks of the group."""

    def send(self, tensor: Tensor, peer: int, direction: int, micro_batch: int) -> None:
        """Start sending to a rank; returns at once."""
        ...

    def receive(self, shape: tuple[int, ...], peer: int, direction: int, micro_batch: int) -> Receive:
        """Post a receive of float32 of ``shape`` from a rank."""
        ...

    def flush(self) -> None:
        """Wait until other processes have read all that was sent."""
        ...

    def close(self) -> None:
        """Leave the group; waits here, in other threads or at a neighbour, fail at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """Meeting place of the members of one generation."""

    host: str
    port: int
    generation: int
    size: int
    timeout_s: float
    """Longest wait of a member for another's tensor [s]."""
    join_s: float | None = None
    """Longest wait of the members for each other to join [s]; ``timeout_s`` if None."""
    codec: str = "none"
    """Codec of activations and gradients between the members; see :class:`ActivationCodec`."""
    name: str = ""
    """Name of the cluster's groups, where processes hold several ranks."""
    processes: tuple[int, ...] = ()
    """Number of the process that holds each rank; empty: each rank has its own."""
    secure: bool = False
    """True if tensors travel over TLS: the machines of the cluster have certificates."""

    @property
    def longest_join_s(self) -> float:
        """Longest wait of the members for each other to join [s]."""
        return self.timeout_s if self.join_s is None else self.join_s


class GlooTransport:
    """One member of a cluster's group."""

    def __init__(self, address: GroupAddress, rank: int, store: TCPStore | None = None) -> None:
        self._timeout = timedelta(seconds=address.timeout_s)
        if store is None:
            store = TCPStore(address.host, address.port, is_master=False, timeout=_join_timeout(address))
        self.rank = rank
        self.generation = address.generation
        self.size = address.size
        self._store = store
        self.codec = ActivationCodec(address.codec)
        # One group for each direction: gloo's thread spins for as long as another thread writes to a connection on
        # which something arrives, so a connection carries tensors one way only.
        self._groups: list[Any] = [
            ProcessGroupGloo(
                PrefixStore(f"{address.generation}/{direction}", store), rank, address.size, _options(address)
            )
            for direction in (FORWARD, BACKWARD)
        ]
        # The sender's tensors must live until the peer has read them.
        self._pending_sends: list[tuple[Tensor, Any]] = []
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, peer: int, direction: int, micro_batch: int) -> None:
        """Start sending; returns at once."""
        tensor = self.codec.encode(tensor.detach()).contiguous()
        with self._lock:
            try:
                work = self._group(direction).send([tensor], peer, micro_batch)
            except RuntimeError as error:
                raise TransportError(f"sending micro-batch {micro_batch} to rank {peer}: {error}") from error
            self._pending_sends.append((tensor, work))

    def receive(
        self, shape: tuple[int, ...], peer: int, direction: int, micro_batch: int, activity: str = ""
    ) -> Receive:
        """Post a receive of float32 of ``shape``; ``wait`` on what it returns."""
        wire_shape, dtype = self.codec.wire(shape)
        tensor = torch.empty(wire_shape, dtype=dtype)
        activity = activity or receive_activity(direction, micro_batch, peer)
        with self._lock:
            try:
                work = self._group(direction).recv([tensor], peer, micro_batch)
            except RuntimeError as error:
                raise TransportError(f"{activity}: {error}") from error

        def take() -> Tensor:
            work.wait(self._timeout)
            return tensor

        return Receive(take, activity, self.codec)

    def _group(self, direction: int) -> Any:
        if not self._groups:
            raise RuntimeError("this member has left the group")
        return self._groups[direction]

    def flush(self) -> None:
        """Wait until the peers have read all that was sent."""
        with self._lock:
            sent, self._pending_sends = self._pending_sends, []
        for _, work in sent:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise TransportError(f"sending: {error}") from error

    def close(self) -> None:
        """Leave the group; waits here, in other threads or at a neighbour, fail at once."""
        with self._lock:
            self._pending_sends.clear()
            groups, self._groups = self._groups, []
        # Letting go of a group closes nothing while a thread still waits in it, and gloo has no call that does.
        # A receive that times out does: gloo then closes every connection of this member. One from a peer that has
        # left fails before it times out, so all are tried.
        for group in groups:
            for peer in [(self.rank + i) % self.size for i in range(1, self.size)]:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def receive_activity(direction: int, micro_batch: int, peer: int) -> str:
    """Describe the wait for a tensor, for messages."""
    name = "activations" if direction == FORWARD else "the gradient"
    return f"waiting for {name} of micro-batch {micro_batch} from rank {peer}"


def _options(address: GroupAddress) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _join_timeout(address)
    options._devices = [ProcessGroupGloo.create_device(hostname=member_address(address))]
    return options


def _join_timeout(address: GroupAddress) -> timedelta:
    return timedelta(seconds=address.longest_join_s)


def member_address(address: GroupAddress) -> str:
    """Return the address at which this member listens to its neighbours.

    Gloo speaks in plain bytes: within one machine nobody outside it may listen, and between machines only who can
    reach the cluster's own network. It would take what the machine's name stands for, which is often a loopback.
    """
    if is_loopback(address.host):
        return address.host
    family, kind, protocol, _, peer = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing; the system chooses the address that it would reach the control unit from.
        probe.connect(peer)
        return str(probe.getsockname()[0])


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Host the meeting point of a cluster on a free port of ``host``, and on no other address."""
    # torch's own socket would listen on every address of the machine.
    with socket.create_server((host, 0), backlog=128) as server:
        port = server.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=server.detach(),
        )
