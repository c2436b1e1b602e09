"""The CU's end of the decoder stream: safetensors frames over one bidirectional gRPC call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import grpc
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.base import Gradient, LinkError
from client_pipeline.link.frames import (
    DEFAULT_MAX_BYTES,
    PROTOCOL_VERSION,
    TARGET_PREFIX,
    Frame,
    FrameError,
    decode,
    encode,
)
from client_pipeline.link.hosts import is_loopback as is_loopback
from client_pipeline.link.tied import TiedRows, pieces
from client_pipeline.partition.parts import target_weight
from client_pipeline.runtime.micro_batches import StepId

SERVICE = "collapipe.Decoder"
METHOD = "Exchange"

_GRACE_S = 15.0
"""A CU waits this much longer than the decoder does, so that the decoder's own reason arrives first."""


@dataclass(frozen=True, kw_only=True)
class DecoderAddress:
    """What a CU is told, in its Flower train message, about the decoder of one round. All values are scalars."""

    target: str
    """``host:port``."""
    token: str = field(repr=False)
    """Good for one stream of this round and cluster."""
    round: int
    cluster: int
    join_timeout_s: float = 60.0
    """How long the decoder may wait for the other CUs before it welcomes this one."""
    step_timeout_s: float = 300.0
    """How long the decoder may wait for the other CUs to close a step."""
    max_frame_bytes: int = DEFAULT_MAX_BYTES
    tls: bool = False
    root_certificate: str = ""
    """PEM text that the decoder's certificate is checked against."""

    def to_dict(self) -> dict[str, str | int | float | bool]:
        """Return scalars by name, as a Flower ConfigRecord takes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderAddress:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            If a value is missing, unknown or of another type.
        """
        kinds = {"str": str, "int": int, "float": float, "bool": bool}
        expected = {f.name: kinds[str(f.type)] for f in fields(cls)}
        wrong = sorted(expected.keys() ^ values.keys())
        wrong += [name for name, kind in expected.items() if name in values and type(values[name]) is not kind]
        if wrong:
            raise ValueError(f"address of the decoder: missing, unknown or of another type: {', '.join(wrong)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class LinkCertificates:
    """A CU's own files for TLS (PEM); empty where they are not needed."""

    certificate: str = ""
    """The CU's certificate, for mutual TLS."""
    key: str = field(default="", repr=False)
    """Path of its private key."""
    root_certificate: str = ""
    """Checks the decoder's certificate in place of the root that the train message brings."""


def channel_options(max_frame_bytes: int) -> list[tuple[str, int]]:
    """Options that both ends share."""
    return [
        ("grpc.max_send_message_length", max_frame_bytes),
        ("grpc.max_receive_message_length", max_frame_bytes),
        # Activations of a MiB in one HTTP/2 frame, not in 64 of the default size.
        ("grpc.http2.max_frame_size", 2**24 - 1),
        # A peer that vanished without a word is noticed within about a minute.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 30_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


class DecoderStream:
    """A :class:`~client_pipeline.link.base.DecoderLink` to the decoder service.

    One thread may call :meth:`begin_step`, :meth:`send` and :meth:`end_step` while another calls
    :meth:`receive`. As a context manager it closes in good order, or breaks off after an exception.
    """

    def __init__(self, address: DecoderAddress, channel: grpc.Channel, codec: ActivationCodec) -> None:
        self.address = address
        self.codec = codec
        self.decoder_sync = ""
        """``step`` or ``round``, as the decoder said in its welcome."""
        self.bytes_up = self.bytes_down = self.payload_up = self.payload_down = 0
        self._channel = channel
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[bytes | LinkError] = queue.SimpleQueue()
        self._failure: LinkError | None = None
        self._closed = False
        self._step: StepId | None = None
        self._num_micro_batches = 0
        self._total_weight: float | None = None
        self._tied = TiedRows({})
        self._received = 0
        self._ended = 0
        self._applied = 0
        exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None)
        self._call = exchange(iter(self._outbox.get, None))
        self._reader = threading.Thread(target=self._read, name="decoder-stream", daemon=True)
        self._reader.start()

    @classmethod
    def open(
        cls,
        address: DecoderAddress,
        certificates: LinkCertificates | None = None,
        codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
    ) -> DecoderStream:
        """Connect, say hello and wait for the welcome.

        Parameters
        ----------
        address : the decoder's
        certificates : the CU's own
        codec : how activations and gradients travel; the decoder refuses any other than its own

        Raises
        ------
        LinkError
            If the decoder cannot be reached, refuses (the message brings its reason) or does not answer in time.
        ValueError
            If a certificate file cannot be read.
        """
        stream = cls(address, _channel(address, certificates or LinkCertificates()), codec)
        try:
            hello = {"version": PROTOCOL_VERSION, "token": address.token, "codec": codec.name}
            stream._put({"kind": "hello", **hello, "round": address.round, "cluster": address.cluster})
            stream.decoder_sync = str(stream._next("welcome", "its welcome", address.join_timeout_s)["decoder_sync"])
        except BaseException:
            stream.abort()
            raise
        return stream

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """Announce a step; what was announced travels with the first micro-batch."""
        if self._step is not None:
            raise self._error(f"step {step.step} was begun while step {self._step.step} is open")
        self._step, self._num_micro_batches, self._total_weight = step, num_micro_batches, float(total_weight)
        self._received = 0

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """Send the tied matrices; not in a round's first step: the decoder has the round's own weights."""
        step = self._step
        if step is None:
            raise self._error("tied matrices were sent before begin_step")
        self._tied = TiedRows({name: value.shape for name, value in tied.items()})
        if step.step > 1:
            for name, start, rows in pieces(tied, self.address.max_frame_bytes):
                place = {"round": step.round, "step": step.step, "name": name, "start": start}
                self._put({"kind": "tied", **place}, {"rows": rows})

    def receive_tied(self) -> dict[str, Tensor]:
        """Wait for the gradient of the tied matrices."""
        step, rows = self._step, self._tied
        if step is None:
            raise self._error("a gradient of tied matrices was awaited before begin_step")
        while (name := rows.missing) is not None:
            frame = self._take("tied_gradient", f"the gradient of the tied matrix {name}, step {step.step}", None)
            if (frame.header["round"], frame.header["step"]) != (step.round, step.step):
                raise self._error(f"found a tied gradient of another step where that of step {step.step} was awaited")
            try:
                rows.add(frame.header["name"], frame.header["start"], frame.tensors["rows"])
            except ValueError as error:
                raise self._error(f"gradient of the {error}") from None
        return rows.values

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Send activations, mask and targets of one micro-batch; returns before they have arrived."""
        if self._step is None:
            raise self._error("a micro-batch was sent before begin_step")
        header = {
            "kind": "micro_batch",
            "round": self._step.round,
            "step": self._step.step,
            "micro_batch": micro_batch,
            "num_micro_batches": self._num_micro_batches,
            "weight": float(target_weight(targets)),
            "seed": self._step.seed,
        }
        if self._total_weight is not None:
            header["total_weight"], self._total_weight = self._total_weight, None
        named = {f"{TARGET_PREFIX}{name}": tensor for name, tensor in targets.items()}
        self._put(header, {"hidden": self.codec.encode(hidden_BTD), "mask": mask_BT, **named})

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch."""
        step, expected = self._step, self._received
        if step is None:
            raise self._error("a gradient was awaited before begin_step")
        awaited = f"the gradient of micro-batch {expected}, step {step.step}"
        header, tensor = self._next_with_tensor("gradient", awaited)
        if (header["round"], header["step"], header["micro_batch"]) != (step.round, step.step, expected):
            raise self._error(f"found another gradient where {awaited} was awaited")
        try:
            tensor = self.codec.decode(tensor)
        except ValueError as error:
            raise self._error(f"{awaited}: {error}") from None
        self._received += 1
        return Gradient(
            micro_batch=expected, tensor=tensor, loss_sum=float(header["loss_sum"]), norm_sq=header.get("norm_sq")
        )

    def drop_step(self) -> None:
        """Break off."""
        self.abort()

    def end_step(self, scale: float) -> None:
        """Close the step; that it counted is confirmed at the latest by :meth:`close`."""
        if self._step is None:
            raise self._error("a step was closed before begin_step")
        step, self._step = self._step, None
        self._put({"kind": "step_end", "round": step.round, "step": step.step, "scale": float(scale)})
        self._ended += 1

    def close(self) -> None:
        """Say goodbye and wait until every closed step counted; breaks off if a step is still open.

        Raises
        ------
        LinkError
            If the decoder does not confirm the steps.
        """
        if self._closed:
            return
        if self._step is not None:
            self.abort()
            return
        try:
            self._put({"kind": "bye"})
            self._next("goodbye", "its goodbye")
            if self._applied != self._ended:
                raise self._error(f"only {self._applied} of {self._ended} steps were confirmed")
        finally:
            self.abort()

    def abort(self) -> None:
        """Break the stream off; the decoder discards an unclosed step. Never raises."""
        if not self._closed:
            self._closed = True
            self._call.cancel()
            self._outbox.put(None)  # the thread in grpc that reads the outbox has no other way to end
            self._channel.close()
            self._reader.join(timeout=5)

    def __enter__(self) -> DecoderStream:
        """Return the open stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close after success, break off after an exception."""
        self.close() if kind is None else self.abort()

    def _error(self, text: str) -> LinkError:
        where = f"round {self.address.round}, cluster {self.address.cluster}"
        return LinkError(f"decoder at {self.address.target} ({where}): {text}")

    def _put(self, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        if self._failure is not None:
            raise LinkError(f"{self._failure}; a {header['kind']} frame was to be sent")
        if self._closed:
            raise self._error(f"a {header['kind']} frame was sent on a closed stream")
        try:
            data = encode(header, tensors)
        except FrameError as error:
            raise self._error(str(error)) from None
        if len(data) > self.address.max_frame_bytes:
            raise self._error(
                f"a {header['kind']} frame has {len(data)} bytes, at most {self.address.max_frame_bytes} are accepted; "
                "raise decoder.max-frame-bytes or use more micro-batches"
            )
        self.bytes_up += len(data)
        self.payload_up += sum(tensor.nbytes for tensor in (tensors or {}).values())
        self._outbox.put(data)

    def _next(self, kind: str, awaited: str, timeout_s: float | None = None) -> dict[str, Any]:
        return self._take(kind, awaited, timeout_s).header

    def _next_with_tensor(self, kind: str, awaited: str) -> tuple[dict[str, Any], Tensor]:
        frame = self._take(kind, awaited, None)
        return frame.header, frame.tensors["gradient"]

    def _take(self, kind: str, awaited: str, timeout_s: float | None) -> Frame:
        """Take the next frame of ``kind``, counting the confirmations that come before it."""
        timeout_s = _GRACE_S + (self.address.step_timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                data = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                raise self._error(
                    f"{awaited} did not come within {timeout_s:g} s; raise decoder.step-timeout if this or another "
                    "cluster is only slow"
                ) from None
            if isinstance(data, LinkError):
                self._inbox.put(data)  # for whoever asks next
                raise LinkError(f"{data}; {awaited} was awaited")
            self.bytes_down += len(data)
            try:
                frame = decode(data, self.address.max_frame_bytes)
            except FrameError as error:
                raise self._error(str(error)) from None
            self.payload_down += frame.payload_bytes
            if frame.kind == "step_applied":
                self._applied += 1
            elif frame.kind == kind:
                return frame
            else:
                raise self._error(f"found a {frame.kind} frame where {awaited} was awaited")

    def _read(self) -> None:
        """Move answers into the inbox, so that waiting for them can be bounded."""
        reason = "the stream has ended"
        try:
            for data in self._call:
                self._inbox.put(data)
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)
            reason = _reason(call.code(), call.details() or "no reason given")
        except ValueError:
            pass  # the channel was closed under the call
        self._failure = self._error(reason)
        self._inbox.put(self._failure)


def _reason(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"cannot be reached, or went away: {details}"
    if code is grpc.StatusCode.CANCELLED:
        return "the stream was broken off"
    return f"refused ({code.name.lower().replace('_', ' ')}): {details}"


def _channel(address: DecoderAddress, certificates: LinkCertificates) -> grpc.Channel:
    # One connection per stream; a proxy for the outer world must not stand between two local processes.
    options = [*channel_options(address.max_frame_bytes), ("grpc.use_local_subchannel_pool", 1)]
    if is_loopback(address.target.rpartition(":")[0]):
        options.append(("grpc.enable_http_proxy", 0))
    if not address.tls:
        return grpc.insecure_channel(address.target, options=options)
    root = read_pem(certificates.root_certificate, "root certificate") or address.root_certificate.encode()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=root or None,
        private_key=read_pem(certificates.key, "private key"),
        certificate_chain=read_pem(certificates.certificate, "certificate"),
    )
    return grpc.secure_channel(address.target, credentials, options=options)


def read_pem(path: str, what: str) -> bytes | None:
    """Read a PEM file; None for an empty path.

    Raises
    ------
    ValueError
        If the file cannot be read or holds no PEM.
    """
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}; give the path of a PEM file") from None
    if b"-----BEGIN" not in data:
        raise ValueError(f"{what} {path}: expected a PEM file (-----BEGIN ...), found something else")
    return data
