"""Stages that share a process: tensors pass between them in memory, and to other processes by gloo or TLS.

In simulation one actor hosts several devices, and the control unit too where it has room. The ranks of one process are
one member of the group between processes, which :class:`ProcessMember` is for all of them; ranks of one process never
use it among each other. What was sent must not be written to any more: in memory it is not copied.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.runtime.transport.meeting_point import MeetingPoint
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.tls_transport import TlsTransport
from client_pipeline.runtime.transport.transport import (
    GlooTransport,
    GroupAddress,
    Receive,
    Transport,
    TransportError,
    open_store,
    receive_activity,
)

TURN_TO_COMPUTE = threading.RLock()
"""Held while a stage of this process computes.

An actor stands for one processor core: stages that computed at the same time would only slow each other down, and the
times that they report would hold each other's work."""
_REGISTRY = threading.Lock()
_MEMBERS: dict[tuple[str, int, int], Future[ProcessMember]] = {}
"""Members of this process, by group, generation and first rank."""


def join_group(address: GroupAddress, rank: int) -> Transport:
    """Take a rank's place in a group; waits until all members have come.

    Raises
    ------
    RuntimeError, TimeoutError
        If one does not come in time.
    """
    return SharedTransport(address, rank) if address.processes else _member_between_processes(address, rank)


def open_meeting(host: str, timeout_s: float) -> MeetingPoint | TCPStore:
    """Host the place where members of a group find each other, on a free port of ``host``; over TLS where there is."""
    tls = NodeTls.from_environment()
    return MeetingPoint(host, tls, timeout_s) if tls else open_store(host, timeout_s)


def _member_between_processes(address: GroupAddress, rank: int) -> GlooTransport | TlsTransport:
    tls = NodeTls.from_environment()
    if address.secure != (tls is not None):
        # A machine in between must not make them speak plain text.
        have, asked = ("has certificates", "plain text") if tls else ("has no certificates", "TLS")
        raise RuntimeError(
            f"this machine {have} of its cluster, and is asked for {asked}; let all machines of the "
            "cluster join the same edge server"
        )
    return TlsTransport(address, rank, tls) if tls else GlooTransport(address, rank)


class _Place(NamedTuple):
    """Place at which a tensor waits for the rank that receives it."""

    receiver: int
    direction: int
    micro_batch: int


class ProcessMember:
    """All ranks of a group that one process holds.

    Parameters
    ----------
    address : the group
    ranks : those of this process
    """

    def __init__(self, address: GroupAddress, ranks: tuple[int, ...]) -> None:
        self.ranks = frozenset(ranks)
        self._timeout_s = address.timeout_s
        self._tensors: dict[_Place, Future[Tensor]] = {}
        """Futures of the places with a tensor or a wait: each wait wakes for its own tensor alone."""
        self._closed = False
        self._member: GlooTransport | TlsTransport | None = None
        numbers = sorted(set(address.processes))
        self._process_by_rank = [numbers.index(process) for process in address.processes]
        self._size = address.size
        if len(numbers) > 1:
            between = replace(address, size=len(numbers), processes=())
            self._member = _member_between_processes(between, self._process_by_rank[ranks[0]])

    def hand_over(self, tensor: Tensor, place: _Place) -> None:
        """Give a tensor to a rank of this process.

        Raises
        ------
        TransportError
            If the group was left.
        """
        try:
            self._at(place).set_result(tensor)
        except InvalidStateError:
            cause = "this member has left the group" if self._closed else f"the last tensor of {place} was not taken"
            raise TransportError(cause) from None

    def take(self, place: _Place) -> Tensor:
        """Wait for a tensor from a rank of this process.

        Raises
        ------
        TransportError
            If the group was left, or nothing came within its timeout.
        """
        try:
            return self._at(place).result(self._timeout_s)
        except TimeoutError:
            raise TransportError(f"nothing came in {self._timeout_s:g} s") from None
        finally:
            # The next batch has the place again.
            self._tensors.pop(place, None)

    def _at(self, place: _Place) -> Future[Tensor]:
        """Return the future tensor of a place; of a group that was left, the error."""
        waiting = self._tensors.setdefault(place, Future())
        # Leaving sets the flag first and looks for waits afterwards.
        if self._closed:
            _leave(waiting)
        return waiting

    def between_processes(self, rank: int) -> tuple[GlooTransport | TlsTransport, int]:
        """The group's member for this process, and the number among the members of the process that holds ``rank``."""
        assert self._member is not None
        return self._member, self._process_by_rank[rank]

    def tag(self, receiver: int, micro_batch: int) -> int:
        """Tag of what goes to a rank: a process holds several."""
        return micro_batch * self._size + receiver

    def flush(self) -> None:
        """Wait until other processes have read all that was sent."""
        if self._member is not None:
            self._member.flush()

    def close(self) -> None:
        """Leave the group with all ranks; waits here or at a neighbour fail at once."""
        self._closed = True
        for waiting in list(self._tensors.values()):
            _leave(waiting)
        self._tensors.clear()
        if self._member is not None:
            self._member.close()


def _leave(waiting: Future[Tensor]) -> None:
    """Raise an error in all waits."""
    with contextlib.suppress(InvalidStateError):
        waiting.set_exception(TransportError("this member has left the group"))


class SharedTransport:
    """One rank of a group in a process that holds several of its ranks; used as :class:`GlooTransport` is."""

    def __init__(self, address: GroupAddress, rank: int) -> None:
        self.rank = rank
        self.generation = address.generation
        self.size = address.size
        self.codec = ActivationCodec(address.codec)
        self._key, self._member = _join(address, rank)

    def send(self, tensor: Tensor, peer: int, direction: int, micro_batch: int) -> None:
        """Start sending; returns at once."""
        if peer in self._member.ranks:
            wire = self.codec.encode(tensor.detach()).contiguous()
            self._member.hand_over(wire, _Place(peer, direction, micro_batch))
            return
        between, process = self._member.between_processes(peer)
        between.send(tensor, process, direction, self._member.tag(peer, micro_batch))

    def receive(self, shape: tuple[int, ...], peer: int, direction: int, micro_batch: int) -> Receive:
        """Post a receive of float32 of ``shape``; ``wait`` on what it returns."""
        activity = receive_activity(direction, micro_batch, peer)
        if peer in self._member.ranks:
            place = _Place(self.rank, direction, micro_batch)
            return Receive(partial(self._member.take, place), activity, self.codec)
        between, process = self._member.between_processes(peer)
        return between.receive(shape, process, direction, self._member.tag(self.rank, micro_batch), activity)

    def flush(self) -> None:
        """Wait until other processes have read all that was sent."""
        self._member.flush()

    def close(self) -> None:
        """Leave the group, with all ranks of this process."""
        with _REGISTRY:
            _MEMBERS.pop(self._key, None)
        self._member.close()


def _join(address: GroupAddress, rank: int) -> tuple[tuple[str, int, int], ProcessMember]:
    """Join with the first rank of this process that comes; the others wait for it."""
    process = address.processes[rank]
    ranks = tuple(r for r, other in enumerate(address.processes) if other == process)
    key = (address.name, address.generation, ranks[0])
    with _REGISTRY:
        joined = _MEMBERS.get(key)
        is_first = joined is None
        if joined is None:
            joined = _MEMBERS[key] = Future()
    if is_first:
        try:
            joined.set_result(ProcessMember(address, ranks))
        except BaseException as error:
            with _REGISTRY:
                _MEMBERS.pop(key, None)
            joined.set_exception(error)
            raise
    return key, joined.result(timeout=address.longest_join_s)
