"""Limits on the frames and hellos that unknown peers and faulty clusters send to the decoder's service."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

WRONG_HELLOS = 32
"""Wrong hellos in a row that a peer may send; afterwards one a second."""
WRONG_HELLOS_PER_S = 1.0
_PEERS = 1024


class TooManyHellos(PermissionError):
    """Refusal of a peer before its hello is read."""


class Allowance:
    """A token bucket: ``burst`` at once, ``rate`` a second in the long run.

    Not safe to call from several threads: the owner holds a lock, or is one thread.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst = rate, burst
        self._clock = clock
        self._tokens, self._refilled_at = burst, clock()

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._refilled_at) * self.rate)
        self._refilled_at = now

    @property
    def empty(self) -> bool:
        """True if no token is left."""
        self._refill()
        return self._tokens < 1

    @property
    def full(self) -> bool:
        """True if no token is in use."""
        self._refill()
        return self._tokens >= self.burst

    def take(self) -> float:
        """Take one token, on credit if none is left; returns the time to wait for it [s]."""
        self._refill()
        self._tokens -= 1
        return max(-self._tokens / self.rate, 0.0)


class HelloGuard:
    """Limit on the streams that await their hello, and on the wrong hellos of a peer.

    A token has 256 random bits, so it cannot be guessed. The limits bound the threads, time and log lines that guesses
    cost the other clusters. A peer is its address, with its certificate's name under mutual TLS. Silent streams shut no
    one out: when all places are taken, the oldest pending stream of the busiest peer is evicted.

    Parameters
    ----------
    most_waiting : streams whose hello is awaited at the same time, of all peers
    clock : [s]; a monotonic one
    """

    def __init__(self, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_waiting = most_waiting
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting_streams: dict[int, tuple[str, Callable[[], object]]] = {}
        """Peer, and the call that ends its stream, by place; the oldest is first."""
        self._wrong: OrderedDict[str, Allowance] = OrderedDict()
        self._num_refused: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Streams whose hello is awaited."""
        with self._lock:
            return len(self._waiting_streams)

    def enter(self, peer: str, give_way: Callable[[], object]) -> int:
        """Let a stream wait for its hello; returns its place, to :meth:`leave`.

        Parameters
        ----------
        peer : name of the other end, see :func:`peer_name`
        give_way : ends the stream; called from another thread if a newer stream takes its place

        Raises
        ------
        TooManyHellos
            If the peer has sent too many wrong hellos.
        """
        end_oldest: Callable[[], object] = int
        self.check(peer)
        with self._lock:
            if len(self._waiting_streams) >= self.most_waiting:
                peers = Counter(waiting_peer for waiting_peer, _ in self._waiting_streams.values())
                crowded = max(peers, key=lambda name: peers[name])
                oldest = next(
                    place for place, (waiting_peer, _) in self._waiting_streams.items() if waiting_peer == crowded
                )
                end_oldest = self._waiting_streams.pop(oldest)[1]
                self._num_refused["gave way to a newer stream"] += 1
            place = next(self._numbers)
            self._waiting_streams[place] = (peer, give_way)
        end_oldest()
        return place

    def check(self, peer: str) -> None:
        """Raise TooManyHellos if a peer has sent too many wrong hellos."""
        with self._lock:
            allowance = self._wrong.get(peer)
            if allowance is not None and allowance.empty:
                self._num_refused["too many wrong hellos"] += 1
                raise TooManyHellos("too many wrong hellos from this peer; wait, then use the round's token")

    def leave(self, place: int) -> bool:
        """Free the place of a stream that no longer awaits its hello; returns whether it still had it."""
        with self._lock:
            return self._waiting_streams.pop(place, None) is not None

    def count(self, reason: str) -> None:
        """Note a hello that never came."""
        with self._lock:
            self._num_refused[reason] += 1

    def wrong(self, peer: str, reason: str) -> None:
        """Note a hello that was refused."""
        with self._lock:
            self._num_refused[reason] += 1
            if peer not in self._wrong:
                # The table of peers is bounded, too: the peer without a wrong hello for longest is dropped.
                if len(self._wrong) >= _PEERS:
                    self._wrong.popitem(last=False)
                self._wrong[peer] = Allowance(WRONG_HELLOS_PER_S, WRONG_HELLOS, self._clock)
            self._wrong.move_to_end(peer)
            self._wrong[peer].take()

    def take_refused(self) -> dict[str, int]:
        """Return the number of hellos refused since the last call, by reason."""
        with self._lock:
            refused, self._num_refused = dict(sorted(self._num_refused.items())), Counter()
        return refused


def peer_name(names: Iterable[bytes] | None, address: str) -> str:
    """Return the name of a peer: the names in its certificate, if it has one, then its address without the port.

    The certificate alone is not enough, because many clusters may share it.
    """
    return " ".join([*sorted(name.decode(errors="replace") for name in names or ()), address.rpartition(":")[0]])
