"""Admission to the decoder's service: first frames, tokens, and the streams of each cluster."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.frames import PROTOCOL_VERSION, Frame, FrameError, decode
from strategies.decoder.limits import Allowance, HelloGuard, TooManyHellos, peer_name
from strategies.decoder.round import Seat
from strategies.decoder.tokens import RoundTokens
from strategies.decoder.trainer import DecoderTrainer
from strategies.printable import printable

HELLO_TIMEOUT_S = 20.0
"""Longest wait for a stream's hello [s]."""
STREAMS_OF_A_CLUSTER = 4
"""Streams of a cluster that are served at once; all but the newest are about to end as replaced."""
_HELLO_BYTES = 16 * 2**10
NEWS_PER_S = 8.0
"""News messages that a cluster may send, per second in the long run; twice as many at once."""
_COMEBACKS, _COMEBACKS_PER_S = 32, 1.0
"""Streams that a cluster may open again in a round: at once, and per second in the long run."""


class StreamContext(Protocol):
    """Part of a gRPC stream's context that the reception uses."""

    def peer(self) -> str: ...  # noqa: D102
    def peer_identities(self) -> Iterable[bytes] | None: ...  # noqa: D102
    def is_active(self) -> bool: ...  # noqa: D102
    def cancel(self) -> object: ...  # noqa: D102
    def add_callback(self, callback: Callable[[], None]) -> bool: ...  # noqa: D102


class OpenStream:
    """Admitted stream of a cluster, with its seat once it has one.

    Parameters
    ----------
    trainer : gives the seat
    round_, cluster : round and cluster of the stream
    number : streams of the cluster before this one
    resume : the token of the next one
    """

    def __init__(self, trainer: DecoderTrainer, round_: int, cluster: int, number: int, resume: str) -> None:
        self.round, self.cluster, self.number, self.resume = round_, cluster, number, resume
        self._trainer = trainer
        self._seat: Seat | None = None

    def sit(self) -> Seat:
        """Join the round, or join it again after a cut.

        Raises
        ------
        Refusal, Superseded
            See :class:`~strategies.decoder.trainer.DecoderTrainer`.
        """
        if self.number:
            self._seat = self._trainer.rejoin(self.round, self.cluster, self.number)
        else:
            self._seat = self._trainer.join(self.round, self.cluster)
        return self._seat

    def refuse(self, reason: str) -> None:
        """Take the cluster out of the round, unless a newer stream acts for it."""
        if self._seat is not None:
            self._seat.leave(reason)
        else:
            self._trainer.dismiss(self.round, self.cluster, reason, self.number)

    def break_off(self) -> None:
        """Note that the stream has ended; its cluster may return if it has a token for that."""
        if self._seat is not None:
            self._seat.away()
        elif not self.number:  # without a welcome it has no token to return with
            self._trainer.dismiss(self.round, self.cluster, "its stream broke off")


class Reception:
    """Admission and record of the open streams. Safe to call from several threads.

    Parameters
    ----------
    trainer : gives seats, and receives the departures of clusters
    codec : how activations travel; a CU that declares another is refused
    num_clusters : most clusters of a round
    """

    def __init__(self, trainer: DecoderTrainer, codec: ActivationCodec, num_clusters: int) -> None:
        self.trainer = trainer
        self.codec = codec
        self.hellos = HelloGuard(num_clusters + 2)
        # Streams without a hello never take the threads of the round's clusters. An evicted stream keeps its thread
        # for a moment longer.
        self.most_streams = STREAMS_OF_A_CLUSTER * num_clusters + 2 * self.hellos.most_waiting
        self._lock = threading.Lock()
        self._tokens = RoundTokens()
        self._streams: dict[StreamContext, int] = {}
        self._served: Counter[int] = Counter()
        """Number of threads that serve a cluster's streams."""
        self._comebacks: dict[int, Allowance] = {}
        self._news: dict[int, Allowance] = {}

    def open_round(self, round_: int, clusters: Iterable[int]) -> dict[int, str]:
        """Return the round's token of each cluster; streams of older rounds are broken off."""
        clusters = list(clusters)
        with self._lock:
            tokens = self._tokens.open(round_, clusters)
            self._comebacks = {cluster: Allowance(_COMEBACKS_PER_S, _COMEBACKS) for cluster in clusters}
            self._news = {cluster: Allowance(NEWS_PER_S, 2 * NEWS_PER_S) for cluster in clusters}
            old = list(self._streams)
        for context in old:
            context.cancel()
        return tokens

    def close_round(self) -> None:
        """Admit no more streams: the round's tokens become invalid."""
        with self._lock:
            self._tokens.close()

    @property
    def num_streams(self) -> int:
        """Streams of clusters that are open."""
        with self._lock:
            return len(self._streams)

    def greet(self, frames: Iterator[bytes], context: StreamContext) -> OpenStream | None:
        """Wait for a stream's first frame, check it, and return the stream.

        None means that the frame took its cluster out of the round, and that the stream has ended. The caller ends
        every other stream with :meth:`release`.

        Raises
        ------
        TooManyHellos
            If the peer, or the cluster, must wait.
        PermissionError
            For a wrong token; the reason tells nothing about the right one.
        FrameError
            If the frame is neither a hello nor a leave frame.
        """
        peer = peer_name(context.peer_identities(), context.peer())
        place = self.hellos.enter(peer, context.cancel)
        # A silent stream must not hold a thread for ever.
        silence = threading.Timer(HELLO_TIMEOUT_S, context.cancel)
        silence.daemon = True
        silence.start()
        try:
            first = next(frames, None)
            if first is None:
                raise FrameError("expected a hello frame, found the end of the stream")
        except BaseException:
            # A silent stream has guessed no token: it is counted, but not as a wrong hello.
            if self.hellos.leave(place):
                self.hellos.count("no hello came")
            raise
        finally:
            silence.cancel()
        refusal = "malformed"
        stream: OpenStream | None = None
        try:
            hello = decode(first, _HELLO_BYTES)
            refusal = "not admitted"
            if hello.kind == "leave":
                self._leave_by_token(hello)
            else:
                stream = self._admit(hello, context)
            refusal = ""
        except TooManyHellos:
            refusal = ""
            raise
        finally:
            self.hellos.leave(place)
            if refusal:
                self.hellos.wrong(peer, refusal)
        return stream

    @contextmanager
    def news(self, data: bytes, context: StreamContext) -> Iterator[dict[str, Any]]:
        """Read a news message and yield its header; one that is refused within counts as a wrong hello.

        Raises
        ------
        TooManyHellos
            If the peer, or the cluster, must wait.
        PermissionError, FrameError
            As for :meth:`greet`.
        """
        peer = peer_name(context.peer_identities(), context.peer())
        self.hellos.check(peer)
        try:
            frame = decode(data, _HELLO_BYTES)
            if frame.kind != "news":
                raise FrameError(f"expected a news frame, found {frame.kind}")
            header = frame.header
            with self._lock:
                self._tokens.check(header["cluster"], header["round"], header["token"])
                allowance = self._news[header["cluster"]]
                if allowance.empty:
                    raise TooManyHellos(f"cluster {header['cluster']} tells too much; try again later")
                allowance.take()
            yield header
        except TooManyHellos:
            raise
        except (PermissionError, ValueError):
            self.hellos.wrong(peer, "wrong news")
            raise

    def heard(self, stream: OpenStream) -> None:
        """Note a frame after a stream's hello: its cluster has the new token and needs no older one."""
        with self._lock:
            self._tokens.hear(stream.round, stream.cluster, stream.number)

    def seat(self, stream: OpenStream, context: StreamContext) -> Seat:
        """Return a stream's seat at the decoder; waits for it.

        Raises
        ------
        Refusal, Superseded
            See :class:`~strategies.decoder.trainer.DecoderTrainer`.
        """
        seat = stream.sit()
        if not context.is_active():  # it ended while it waited, before it had a seat
            self._note_end(context, stream)
        return seat

    def release(self, stream: OpenStream | None) -> None:
        """Note that a stream's thread has ended."""
        if stream is not None:
            with self._lock:
                self._served[stream.cluster] -= 1

    def _admit(self, hello: Frame, context: StreamContext) -> OpenStream:
        """Check the token of a hello: that of the round, or the one that opens a stream again."""
        if hello.kind != "hello":
            raise FrameError(f"expected a hello frame first, found {hello.kind}")
        header = hello.header
        if header["version"] != PROTOCOL_VERSION:
            raise FrameError(
                f"protocol version: expected {PROTOCOL_VERSION}, found {header['version']}; install the same release"
            )
        if (declared := header.get("codec", "none")) != self.codec.name:
            raise FrameError(
                f"codec of the activations: expected {self.codec.name}, found {declared:.40}; set "
                "compression.activations and compression.stream alike on the server and all clusters"
            )
        cluster = int(header["cluster"])
        with self._lock:
            allowance = self._comebacks.get(cluster)
            if self._served[cluster] >= STREAMS_OF_A_CLUSTER or (allowance is not None and allowance.empty):
                raise TooManyHellos(f"cluster {cluster} has opened too many streams in this round; try again later")
            number, resume = self._tokens.admit(cluster, header["round"], header["token"])
            if allowance is not None:
                allowance.take()
            stream = OpenStream(self.trainer, self._tokens.round, cluster, number, resume)
            old = [context_before for context_before, owner in self._streams.items() if owner == cluster]
            self._streams[context] = cluster
            self._served[cluster] += 1
        # An older stream may only look open, its cable cut: the new one replaces it.
        for context_before in old if number else ():
            context_before.cancel()
        if not context.add_callback(lambda: self._note_end(context, stream)):
            self._note_end(context, stream)
        return stream

    def _leave_by_token(self, leave: Frame) -> None:
        """Take a cluster out of the round on a leave frame with the round's token: its control unit is gone."""
        header = leave.header
        if not {"token", "round", "cluster"} <= header.keys():
            raise FrameError("header of a leave frame that comes first: expected token, round and cluster")
        with self._lock:
            self._tokens.check(int(header["cluster"]), header["round"], header["token"])
        self.trainer.dismiss(int(header["round"]), int(header["cluster"]), printable(str(header["reason"])))

    def _note_end(self, context: StreamContext, stream: OpenStream) -> None:
        """Note that a stream has ended, even while its thread still waits."""
        with self._lock:
            self._streams.pop(context, None)
        stream.break_off()
