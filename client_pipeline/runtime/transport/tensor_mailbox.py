"""Tensors that a member of a group expects over TLS, and those that have arrived.

A tensor without a posted receive stays at its sender, as with gloo: memory is planned for posted receives.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.runtime.transport.transport import TransportError


@dataclass(frozen=True)
class TensorKey:
    """Identity of a tensor."""

    peer: int
    direction: int
    tag: int


@dataclass
class PostedTensor:
    """Buffer of a tensor that was asked for."""

    tensor: Tensor
    has_arrived: bool = False


class TensorMailbox:
    """Mailbox of all connections of a member.

    Parameters
    ----------
    timeout_s : how long a tensor may take that is waited for [s]
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._posted: dict[TensorKey, PostedTensor] = {}
        self._early: dict[TensorKey, Tensor] = {}
        self._awaited: dict[TensorKey, int] = {}
        """Tensors that a thread waits for now."""
        self._lost: dict[tuple[int, int], str] = {}
        """Reason why no more tensors come from a peer in a direction."""
        self._is_closed = False

    def post(self, key: TensorKey, buffer: Tensor) -> PostedTensor:
        """Ask for a tensor, which fills ``buffer``."""
        receive = PostedTensor(buffer)
        with self._changed:
            if key in self._early:
                _fill(receive, self._early.pop(key))
                receive.has_arrived = True
            else:
                self._posted[key] = receive
            self._changed.notify_all()
        return receive

    def take(self, key: TensorKey, receive: PostedTensor) -> Tensor:
        """Wait for a posted tensor; raises ``TransportError`` if it does not come."""

        def ended() -> bool:
            return receive.has_arrived or self._is_closed or (key.peer, key.direction) in self._lost

        with self._changed:
            self._awaited[key] = self._awaited.get(key, 0) + 1
            self._changed.notify_all()
            in_time = self._changed.wait_for(ended, self._timeout_s)
            del self._awaited[key]
            if receive.has_arrived:
                return receive.tensor
            if self._is_closed:
                raise TransportError("this member has left the group")
            if not in_time:
                raise TransportError(f"nothing came in {self._timeout_s:g} s")
            raise TransportError(self._lost[key.peer, key.direction])

    def place_for(self, key: TensorKey, num_bytes: int) -> Tensor:
        """Return the buffer of an announced tensor; waits until a receive is posted for it.

        A connection brings one tensor after the other: one that is in the way of another that is waited for is kept
        aside instead.
        """

        def wanted() -> bool:
            return key in self._posted or self._is_closed or self._is_in_the_way(key)

        with self._changed:
            self._changed.wait_for(wanted)
            if self._is_closed:
                raise TransportError("this member has left the group")
            if key not in self._posted:
                return torch.empty(num_bytes, dtype=torch.uint8)
            tensor = self._posted[key].tensor
        if tensor.nbytes != num_bytes:
            raise TransportError(f"expected a tensor of {tensor.nbytes} bytes, found one of {num_bytes}")
        return tensor

    def arrived(self, key: TensorKey, tensor: Tensor) -> None:
        """Note a tensor whose bytes are all there."""
        with self._changed:
            receive = self._posted.pop(key, None)
            if receive is None:
                self._early[key] = tensor
            else:
                if receive.tensor is not tensor:
                    _fill(receive, tensor)
                receive.has_arrived = True
            self._changed.notify_all()

    def lose(self, peer: int, direction: int, reason: str) -> None:
        """Note that nothing more comes from a peer in a direction."""
        with self._changed:
            self._lost.setdefault((peer, direction), reason)
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_in_the_way(self, key: TensorKey) -> bool:
        return any((k.peer, k.direction) == (key.peer, key.direction) and k != key for k in self._awaited)


def _fill(receive: PostedTensor, tensor: Tensor) -> None:
    """Give a receive what was kept aside."""
    if receive.tensor.nbytes != tensor.nbytes:
        raise TransportError(f"expected a tensor of {receive.tensor.nbytes} bytes, found one of {tensor.nbytes}")
    receive.tensor.view(torch.uint8).reshape(-1).copy_(tensor)
