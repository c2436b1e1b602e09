"""The CU's call to the decoder: bytes out, bytes in, opened again when it is cut."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, cast

import grpc

from client_pipeline.link.address import METHOD, NEWS_METHOD, SERVICE, DecoderAddress, LinkCertificates, open_channel
from client_pipeline.link.base import Cut, LinkError, NotFiniteLink
from client_pipeline.link.frames import Frame, FrameError, decode, encode

REOPEN_S = 12.5
"""Longest time of attempts to open a cut stream again [s]; the decoder waits a little longer."""
_WELCOME_S = 5.0
"""Longest time of one attempt [s]."""
_PAUSES_S = (0.0, 0.1, 0.3, 1.0, 2.0)
_FRUITLESS = 5
"""Streams that may be cut one after the other without a single answer between."""
_LEAVE_S = 1.0
_NEWS_S = 1.0


class _Call:
    """One gRPC call to the decoder."""

    def __init__(self, address: DecoderAddress, certificates: LinkCertificates) -> None:
        self._channel = open_channel(address, certificates)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        exchange = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )
        self.answers: Any = exchange(iter(self._outbox.get, None))
        """Iterator over the frames that come."""

    def put(self, data: bytes) -> None:
        """Send a frame."""
        self._outbox.put(data)

    def tell(self, data: bytes) -> None:
        """Send a frame beside the stream, whose frames wait for each other."""
        exchange = self._channel.unary_unary(
            f"/{SERVICE}/{NEWS_METHOD}", request_serializer=None, response_deserializer=None
        )
        exchange(data, timeout=_NEWS_S)

    def end(self) -> None:
        """Send no more: the decoder ends the call when it has read so far."""
        self._outbox.put(None)

    def cancel(self) -> None:
        """Break the call off."""
        self.answers.cancel()

    def close(self) -> None:
        """Break the call off and close its channel."""
        self.end()  # the thread in grpc that reads the outbox has no other way to end
        self.cancel()
        self._channel.close()


class DecoderConnection:
    """A bidirectional gRPC call with a thread that reads it. Safe to call from several threads.

    Parameters
    ----------
    address : the decoder's
    certificates : the CU's own
    hello : makes the first frame of a stream from its token

    Raises
    ------
    ValueError
        If a certificate file cannot be read.
    """

    def __init__(self, address: DecoderAddress, certificates: LinkCertificates, hello: Callable[[str], bytes]) -> None:
        self.address = address
        self._unconfirmed: dict[int, list[bytes]] = {}
        """Frames of each step that the decoder has not confirmed, to be sent again after a cut."""
        self.confirmed = 0
        """Last step that the decoder is known to have taken."""
        self.cuts: list[Cut] = []
        """Cuts that were mended."""
        self._certificates = certificates
        self._hello = hello
        self._resume = ""
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[bytes | LinkError | None] = queue.SimpleQueue()
        self.failure: LinkError | None = None
        """Reason why the stream has ended; None while it is open."""
        self.closed = False
        """True if it was closed from this side."""
        self._fruitless = 0
        self._answered = False
        self._dark_until = 0.0
        """Until then a stream that was cut on purpose stays so [s, monotonic]."""
        self._ready = True
        """True if frames go out at once; between a cut and its end they are only noted."""
        self._call = _Call(address, certificates)
        self._call.put(hello(address.token))
        self._reader = threading.Thread(target=self._read, name="decoder-stream", daemon=True)
        self._reader.start()

    def resume_with(self, token: str) -> None:
        """Note the token that opens the next stream."""
        with self._lock:
            self._resume = token

    def put(self, data: bytes, step: int) -> None:
        """Send a frame; it is kept until its step is confirmed."""
        with self._lock:
            self._unconfirmed.setdefault(step, []).append(data)
            if self._ready:
                self._call.put(data)

    def confirm(self, step: int) -> None:
        """Note that the decoder has taken a step."""
        with self._lock:
            self._confirm(step)

    def _confirm(self, step: int) -> None:
        """Drop the frames of a step that counted, and of those before it; under the lock."""
        self.confirmed = max(self.confirmed, step)
        self._unconfirmed = {number: frames for number, frames in self._unconfirmed.items() if number > step}

    def drop(self, step: int) -> None:
        """Forget the frames of a step that will be begun again, and wake the waiting thread."""
        with self._lock:
            self._unconfirmed.pop(step, None)
        self._inbox.put(None)

    def take(self, timeout_s: float) -> bytes | LinkError | None:
        """Wait for the next answer; None after a step was dropped.

        Raises
        ------
        queue.Empty
            If nothing comes in time.
        """
        answer = self._inbox.get(timeout=timeout_s)
        if isinstance(answer, LinkError):
            self._inbox.put(answer)  # for whoever asks next
        return answer

    def tell(self, news: str) -> None:
        """Tell the server what happens in the round, if it can be reached just now."""
        place = {"token": self.address.token, "round": self.address.round, "cluster": self.address.cluster}
        if time.monotonic() < self._dark_until:
            return
        # ValueError: the channel was closed under the call.
        with contextlib.suppress(grpc.RpcError, ValueError, FrameError):
            self._call.tell(encode({"kind": "news", "text": news, **place}))

    def cut(self, for_s: float = 0.0) -> None:
        """Cut the stream as a network would, and leave it so for a while [s]: for tests, and for injected faults."""
        with self._lock:
            self._dark_until = time.monotonic() + for_s
            self._call.cancel()

    def abort(self, reason: str) -> None:
        """Leave the round, and break off. Never raises."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._call.put(encode({"kind": "leave", "reason": reason[:300]}))
            self._call.end()
        # The decoder ends the stream when it has read so far; it may be waiting for other clusters.
        self._reader.join(timeout=_LEAVE_S)
        with self._lock:
            self._call.close()
        self._reader.join(timeout=_LEAVE_S)

    # The reader.

    def _read(self) -> None:
        """Move answers into the inbox, so that waiting for them can be bounded."""
        end_error = self._drain_first()
        while not self.closed and _is_cut(end_error):
            refused = self._reopen(time.monotonic())
            if refused is not None:
                end_error = refused or end_error
                break
            end_error = self._drain()
        with self._lock:
            self.failure = self._failure_of(end_error)
            if not self.closed:
                self._call.close()
        self._inbox.put(self.failure)

    def _failure_of(self, end_error: grpc.RpcError | None) -> LinkError:
        if end_error is None:
            return LinkError(self.message("the stream has ended"))
        call = cast(grpc.Call, end_error)
        kind = NotFiniteLink if call.code() is grpc.StatusCode.OUT_OF_RANGE else LinkError
        return kind(self.message(_reason(call.code(), call.details() or "no reason given")))

    def _drain_first(self) -> grpc.RpcError | None:
        """Read the call to its end; repeat it if a busy decoder refuses it before it has read the hello."""
        until = time.monotonic() + self.address.join_timeout_s
        tries = 0
        while True:
            end_error = self._drain()
            tries += 1
            pause_s = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
            if self._answered or not _is_turned_away(end_error) or time.monotonic() + pause_s > until:
                return end_error
            time.sleep(pause_s)
            with self._lock:
                if self.closed:
                    return end_error
                self._call_again(self.address.token)

    def _call_again(self, token: str) -> None:
        """Begin another call with a token; under the lock."""
        self._call.close()
        self._call = _Call(self.address, self._certificates)
        self._call.put(self._hello(token))

    def _drain(self) -> grpc.RpcError | None:
        """Read the call to its end; returns the error that it ended with."""
        try:
            for data in self._call.answers:
                self._fruitless = 0
                self._answered = True
                self._inbox.put(data)
        except grpc.RpcError as error:
            return error
        except ValueError:
            pass  # the channel was closed under the call
        return None

    def _reopen(self, noticed: float) -> grpc.RpcError | Literal[False] | None:
        """Open the stream again and send what the decoder has not confirmed.

        Returns
        -------
        None if that succeeded; else the decoder's refusal, or False if it could not be reached.
        """
        self._fruitless += 1
        if self._fruitless > _FRUITLESS:
            return False
        until = noticed + min(REOPEN_S, self.address.step_timeout_s)
        tries = 0
        while time.monotonic() < until:
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
            if time.monotonic() < self._dark_until:
                continue
            with self._lock:
                if self.closed or not self._resume:
                    return False
                self._ready = False
                self._call_again(self._resume)
            welcome = self._welcome()
            if isinstance(welcome, grpc.RpcError):
                return welcome
            if welcome is None:
                continue
            with self._lock:
                self._ready = True
                self._resume = str(welcome.header.get("resume", ""))
                step = int(welcome.header.get("step", 1))
                self._confirm(step - 1)
                first = step + int(welcome.header.get("closed", 0))
                again = [data for n, frames in sorted(self._unconfirmed.items()) if n >= first for data in frames]
                for data in again:
                    self._call.put(data)
                self.cuts.append(Cut(noticed, time.monotonic() - noticed, sum(map(len, again))))
            return None
        return False

    def _welcome(self) -> Frame | grpc.RpcError | None:
        """Return the first answer of a reopened stream, or the decoder's refusal; None without an answer."""
        timer = threading.Timer(_WELCOME_S, self._call.cancel)
        timer.daemon = True
        timer.start()
        try:
            frame = decode(next(self._call.answers), self.address.max_frame_bytes)
        except grpc.RpcError as error:
            # A decoder whose threads wait for attempts that were given up is free again when it has computed.
            busy = cast(grpc.Call, error).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return None if busy or _is_cut(error) else error
        except (FrameError, StopIteration, ValueError):
            return None
        finally:
            timer.cancel()
        return frame if frame.kind == "welcome" else None

    def message(self, text: str) -> str:
        """A message with the decoder's address, the round and the cluster before it."""
        where = f"round {self.address.round}, cluster {self.address.cluster}"
        return f"decoder at {self.address.target} ({where}): {text}"


def give_up(address: DecoderAddress, certificates: LinkCertificates, reason: str, timeout_s: float = 5.0) -> bool:
    """Tell the decoder that a cluster's control unit is gone, so that the others need not wait for it.

    Returns
    -------
    Whether the decoder has heard it.
    """
    place = {"token": address.token, "round": address.round, "cluster": address.cluster}
    frame = encode({"kind": "leave", "reason": reason[:300], **place})
    channel = open_channel(address, certificates)
    try:
        exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None)
        list(exchange(iter([frame]), timeout=timeout_s))
    except grpc.RpcError:
        return False
    finally:
        channel.close()
    return True


def _is_cut(error: grpc.RpcError | None) -> bool:
    """Return whether a network may be the cause, not the decoder."""
    codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
    return error is not None and cast(grpc.Call, error).code() in codes


def _is_turned_away(error: grpc.RpcError | None) -> bool:
    """Return whether the decoder had no place for a stream that had not said hello yet."""
    codes = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
    return error is not None and cast(grpc.Call, error).code() in codes


def _reason(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"cannot be reached, or went away: {details}"
    if code is grpc.StatusCode.CANCELLED:
        return "the stream was broken off"
    return f"refused ({code.name.lower().replace('_', ' ')}): {details}"
