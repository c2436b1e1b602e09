"""What a member of a group has asked for over TLS, and what has come of it.

A tensor that nobody has asked for yet stays at its sender, as with gloo: memory is planned for what was asked for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.runtime.transport import TransportError


@dataclass(frozen=True)
class TensorKey:
    """Which tensor it is."""

    peer: int
    direction: int
    tag: int


class SecureReceive:
    """A posted receive."""

    def __init__(
        self, mailbox: TensorMailbox, key: TensorKey, shape: tuple[int, ...], codec: ActivationCodec, activity: str
    ) -> None:
        wire_shape, dtype = codec.wire(shape)
        self.tensor = torch.empty(wire_shape, dtype=dtype)
        self.has_arrived = False
        self._mailbox, self._key, self._codec, self._activity = mailbox, key, codec, activity

    def wait(self) -> Tensor:
        """Wait for the tensor.

        Raises
        ------
        TransportError
            If the peer closed or stayed silent for the group's timeout.
        """
        try:
            self._mailbox.wait(self, self._key)
        except TransportError as error:
            raise TransportError(f"{self._activity}: {error}") from error
        return self._codec.decode(self.tensor)


class TensorMailbox:
    """For all connections of a member.

    Parameters
    ----------
    timeout_s : how long a tensor may take that is waited for [s]
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._posted: dict[TensorKey, SecureReceive] = {}
        self._early: dict[TensorKey, Tensor] = {}
        self._awaited: dict[TensorKey, int] = {}
        """What a thread waits for by now."""
        self._lost: dict[tuple[int, int], str] = {}
        """Why nothing comes any more from a peer in a direction."""
        self._is_closed = False

    def post(self, receive: SecureReceive, key: TensorKey) -> None:
        """Ask for a tensor."""
        with self._changed:
            if key in self._early:
                _fill(receive, self._early.pop(key))
                receive.has_arrived = True
            else:
                self._posted[key] = receive
            self._changed.notify_all()

    def wait(self, receive: SecureReceive, key: TensorKey) -> None:
        """Wait for what was posted; raises ``TransportError`` if it does not come."""

        def ended() -> bool:
            return receive.has_arrived or self._is_closed or (key.peer, key.direction) in self._lost

        with self._changed:
            self._awaited[key] = self._awaited.get(key, 0) + 1
            self._changed.notify_all()
            in_time = self._changed.wait_for(ended, self._timeout_s)
            del self._awaited[key]
            if receive.has_arrived:
                return
            if self._is_closed:
                raise TransportError("this member has left the group")
            if not in_time:
                raise TransportError(f"nothing came in {self._timeout_s:g} s")
            raise TransportError(self._lost[key.peer, key.direction])

    def place_for(self, key: TensorKey, num_bytes: int) -> Tensor:
        """Where a tensor goes that has announced itself; waits until somebody asks for it.

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
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_in_the_way(self, key: TensorKey) -> bool:
        return any((k.peer, k.direction) == (key.peer, key.direction) and k != key for k in self._awaited)


def _fill(receive: SecureReceive, tensor: Tensor) -> None:
    """Give a receive what was kept aside."""
    if receive.tensor.nbytes != tensor.nbytes:
        raise TransportError(f"expected a tensor of {receive.tensor.nbytes} bytes, found one of {tensor.nbytes}")
    receive.tensor.view(torch.uint8).reshape(-1).copy_(tensor)
