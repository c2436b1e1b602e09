"""The CU's end of the decoder stream: safetensors frames over one bidirectional gRPC call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.address import DecoderAddress, LinkCertificates
from client_pipeline.link.base import Cut, Gradient, LinkError, States
from client_pipeline.link.frames import PROTOCOL_VERSION, TARGET_PREFIX, Frame, FrameError, decode, encode
from client_pipeline.link.kept_examples import KeptExamples
from client_pipeline.link.reopened_connection import DecoderConnection
from client_pipeline.link.tied import TiedRows, pieces
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import target_weight

_GRACE_S = 15.0
"""A CU waits this much longer than the decoder does, so that the decoder's own reason arrives first."""


class DecoderStream:
    """A :class:`~client_pipeline.link.base.DecoderLink` to the decoder service.

    One thread may call :meth:`begin_step`, :meth:`send` and :meth:`end_step` while another calls
    :meth:`receive`, or :meth:`receive_next` and :meth:`send_states_gradient`. As a context manager it closes in good
    order, or breaks off after an exception.

    A stream that is cut is opened again silently: frames that the decoder has not confirmed are sent again,
    answers that come twice are dropped, and bytes count once for each frame, known by round, step and micro-batch.
    """

    def __init__(
        self,
        address: DecoderAddress,
        certificates: LinkCertificates,
        codec: ActivationCodec,
        kept: KeptExamples | None = None,
    ) -> None:
        self.address = address
        self.codec = codec
        self.is_remote = True
        self.decoder_sync = ""
        """``step`` or ``round``, as the decoder said in its welcome."""
        self.kept = kept
        self.bytes_up = self.bytes_down = self.payload_up = self.payload_down = 0
        self._step: StepId | None = None
        self._attempt = 0
        self._dropped: tuple[int, int] = (0, 0)
        """Step that was dropped last, and in which attempt."""
        self._num_micro_batches = 0
        self._total_weight: float | None = None
        self._tied = TiedRows({})
        self._shapes: dict[int, tuple[int, ...]] = {}
        """Shapes of the activations of each micro-batch whose gradient is still to come."""
        self._num_gradients = 0
        self._example_names: dict[int, Sequence[str]] = {}
        """Names of each micro-batch's examples, for the server to keep, until its answer has come."""
        self._num_ended_steps = 0
        self._names = threading.Lock()
        self._counted: set[tuple[Any, ...]] = set()
        """Names of the frames, of steps that are not confirmed, whose bytes are counted."""
        self._answer_names: set[tuple[Any, ...]] = set()
        """Names of the answers that have come in the step's present attempt."""
        hello = {"kind": "hello", "version": PROTOCOL_VERSION, "codec": codec.name}
        place = {"round": address.round, "cluster": address.cluster}
        self._connection = DecoderConnection(
            address, certificates, lambda token: encode({**hello, **place, "token": token})
        )

    @classmethod
    def open(
        cls,
        address: DecoderAddress,
        certificates: LinkCertificates | None = None,
        codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
        kept: KeptExamples | None = None,
    ) -> DecoderStream:
        """Connect, say hello and wait for the welcome.

        Parameters
        ----------
        address : the decoder's
        certificates : the CU's own
        codec : how activations and gradients travel; the decoder refuses any other than its own
        kept : examples whose activations the server keeps; None: it keeps none, and answers with gradients

        Raises
        ------
        LinkError
            If the decoder cannot be reached, refuses (the message brings its reason) or does not answer in time.
        ValueError
            If a certificate file cannot be read.
        """
        stream = cls(address, certificates or LinkCertificates(), codec, kept)
        try:
            welcome = stream._take(("welcome",), "its welcome", address.join_timeout_s).header
            stream.decoder_sync = str(welcome["decoder_sync"])
            stream._connection.resume_with(str(welcome.get("resume", "")))
            if kept is not None:
                kept.of_store(str(welcome.get("store", "")))
        except BaseException:
            stream.abort()
            raise
        return stream

    @property
    def cuts(self) -> list[Cut]:
        """Cuts that were mended; the bytes sent again are in no other count."""
        return self._connection.cuts

    def cut(self, for_s: float = 0.0) -> None:
        """Cut the stream as a network would: for tests, and for faults that a user injects."""
        self._connection.cut(for_s)

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """Announce a step; what was announced travels with the first micro-batch."""
        if self._step is not None:
            raise self._error(f"step {step.step} was begun while step {self._step.step} is open")
        dropped, attempt = self._dropped
        self._attempt = attempt + 1 if dropped == step.step else 0
        with self._names:
            self._answer_names.clear()
        self._step, self._num_micro_batches, self._total_weight = step, num_micro_batches, float(total_weight)
        self._shapes.clear()
        self._example_names.clear()
        self._num_gradients = 0

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """Send the tied matrices; not in a round's first step: the decoder has the round's own weights."""
        step = self._step
        if step is None:
            raise self._error("tied matrices were sent before begin_step")
        self._tied = TiedRows({name: value.shape for name, value in tied.items()})
        if step.step > 1:
            for name, start, rows in pieces(tied, self.address.max_frame_bytes):
                place = {"round": step.round, "step": step.step, "name": name, "start": start, **self._attempt_field()}
                self._put({"kind": "tied", **place}, {"rows": rows})

    def receive_tied(self) -> dict[str, Tensor]:
        """Wait for the gradient of the tied matrices."""
        step, rows = self._step, self._tied
        if step is None:
            raise self._error("a gradient of tied matrices was awaited before begin_step")
        while (name := rows.missing) is not None:
            frame = self._take(("tied_gradient",), f"the gradient of the tied matrix {name}, step {step.step}", None)
            if (frame.header["round"], frame.header["step"]) != (step.round, step.step):
                raise self._error(f"expected the tied gradient of step {step.step}, found that of another step")
            try:
                rows.add(frame.header["name"], frame.header["start"], frame.tensors["rows"])
            except ValueError as error:
                raise self._error(f"gradient of the {error}") from None
        return rows.values

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Send activations, mask and targets of one micro-batch; returns before they have arrived."""
        named = {f"{TARGET_PREFIX}{name}": tensor for name, tensor in targets.items()}
        beside, names = {"mask": mask_BT, **named}, self._example_names.get(micro_batch, ())
        self._send("micro_batch", micro_batch, hidden_BTD, beside, target_weight(targets), names)

    def name_examples(self, micro_batch: int, names: Sequence[str]) -> None:
        """Name the examples of a micro-batch that :meth:`send` will send, for the server to keep."""
        self._example_names[micro_batch] = names

    def recall(self, micro_batch: int, names: Sequence[str], weight: float) -> None:
        """Have the server take one micro-batch of examples that it keeps; :meth:`receive_loss` follows."""
        self._send("recall", micro_batch, None, {}, weight, names)

    def send_forward(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, weight: float) -> None:
        """Send activations and mask of one micro-batch whose targets, of a weight, stay here."""
        self._send("forward", micro_batch, hidden_BTD, {"mask": mask_BT}, weight)

    def _send(
        self,
        kind: str,
        micro_batch: int,
        hidden_BTD: Tensor | None,
        beside: Mapping[str, Tensor],
        weight: float,
        names: Sequence[str] = (),
    ) -> None:
        if self._step is None:
            raise self._error("a micro-batch was sent before begin_step")
        header = {
            "kind": kind,
            "round": self._step.round,
            "step": self._step.step,
            "micro_batch": micro_batch,
            "num_micro_batches": self._num_micro_batches,
            "weight": float(weight),
            "seed": self._step.seed,
            **self._attempt_field(),
        }
        if self._total_weight is not None:
            header["total_weight"], self._total_weight = self._total_weight, None
        if names:
            header["names"] = ",".join(names)
        if hidden_BTD is None:
            self._put(header)
            return
        self._shapes[micro_batch] = tuple(hidden_BTD.shape)
        self._put(header, {"hidden": self.codec.encode(hidden_BTD), **beside})

    def send_states_gradient(self, micro_batch: int, gradient_BTD: Tensor) -> None:
        """Send the gradient of loss_sum / W_n with respect to the states of one micro-batch."""
        if (step := self._step) is None:
            raise self._error("a gradient of states was sent after the step")
        place = {"round": step.round, "step": step.step, "micro_batch": micro_batch, **self._attempt_field()}
        self._put({"kind": "states_gradient", **place}, {"gradient": self.codec.encode(gradient_BTD)})

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch; zeros where the server keeps its activations."""
        if self.kept is not None:
            micro_batch, loss_sum, norm_sq = self.receive_loss()
            if (shape := self._shapes.pop(micro_batch, None)) is None:
                raise self._error(f"the loss of micro-batch {micro_batch} came before its activations were sent")
            zeros = torch.zeros(shape)
            return Gradient(micro_batch=micro_batch, tensor=zeros, loss_sum=loss_sum, norm_sq=norm_sq)
        answer = self._receive(("gradient",))
        assert isinstance(answer, Gradient)
        return answer

    def receive_next(self) -> States | Gradient:
        """Wait for the states of a micro-batch, or the gradient of the next one."""
        return self._receive(("states", "gradient"))

    def receive_loss(self) -> tuple[int, float, float | None]:
        """Wait for the number, loss_sum and norm_sq (see :class:`Gradient`) of the next micro-batch without gradient.

        That its examples are kept is noted.
        """
        header = self._next(("loss",)).header
        self._num_gradients += 1
        names = self._example_names.pop(header["micro_batch"], ())
        if header["kept"] and self.kept is not None:
            self.kept.add(names)
        norm_sq = header.get("norm_sq")
        return header["micro_batch"], float(header["loss_sum"]), None if norm_sq is None else float(norm_sq)

    def _next(self, kinds: tuple[str, ...]) -> Frame:
        """Wait for an answer, which is of the next micro-batch unless it brings states."""
        step, next_micro_batch = self._step, self._num_gradients
        if step is None:
            raise self._error("a gradient was awaited before begin_step")
        awaited = f"the {kinds[-1]} of micro-batch {next_micro_batch}, step {step.step}"
        frame = self._take(kinds, awaited, None)
        header = frame.header
        if (header["round"], header["step"]) != (step.round, step.step) or (
            frame.kind != "states" and header["micro_batch"] != next_micro_batch
        ):
            raise self._error(f"expected {awaited}, found another {frame.kind}")
        return frame

    def _receive(self, kinds: tuple[str, ...]) -> States | Gradient:
        frame = self._next(kinds)
        header, is_gradient = frame.header, frame.kind == "gradient"
        micro_batch, wire = header["micro_batch"], frame.tensors[frame.kind]
        shape = self._shapes.pop(micro_batch, None) if is_gradient else self._shapes.get(micro_batch)
        if shape is None or (tuple(wire.shape), wire.dtype) != self.codec.wire(shape):
            # Before it is decoded: bytes of another shape could become many times as much.
            what = f"the {frame.kind} of micro-batch {micro_batch}, step {header['step']},"
            activations = "before they were sent" if shape is None else f"of shape {list(shape)}"
            raise self._error(f"{what} is {wire.dtype} {list(wire.shape)}, for activations {activations}")
        tensor = self.codec.decode(wire)
        if not is_gradient:
            return States(micro_batch=micro_batch, tensor=tensor)
        self._num_gradients += 1
        return Gradient(
            micro_batch=micro_batch,
            tensor=tensor,
            loss_sum=float(header["loss_sum"]),
            norm_sq=header.get("norm_sq"),
        )

    def tell(self, news: str) -> None:
        """Send news of the round to the server; nothing waits for it, and later news replace a lost one."""
        if not self._connection.closed:
            self._connection.tell(news)

    def drop_step(self) -> None:
        """Break off the step in progress; the decoder forgets it when it is begun again, or with the round."""
        if self._step is not None:
            step, self._step = self._step.step, None
            self._dropped = (step, self._attempt)
            self._connection.drop(step)

    def end_step(self, scale: float) -> None:
        """Close the step; that it counted is confirmed at the latest by :meth:`close`."""
        if self._step is None:
            raise self._error("a step was closed before begin_step")
        step, self._step = self._step, None
        self._put({"kind": "step_end", "round": step.round, "step": step.step, "scale": float(scale)})
        self._num_ended_steps += 1

    def close(self) -> None:
        """Say goodbye and wait until every closed step counted; breaks off if a step is still open.

        Raises
        ------
        LinkError
            If the decoder does not confirm the steps.
        """
        if self._connection.closed:
            return
        if self._step is not None:
            self.abort()
            return
        try:
            self._put({"kind": "bye"})
            self._take(("goodbye",), "its goodbye", None)
            if (applied := self._connection.confirmed) != self._num_ended_steps:
                raise self._error(f"only {applied} of {self._num_ended_steps} steps were confirmed")
        finally:
            self.abort()

    def abort(self) -> None:
        """Break the stream off; the decoder discards an unclosed step. Never raises."""
        self._connection.abort("its stream broke off")

    def __enter__(self) -> DecoderStream:
        """Return the open stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close after success, break off after an exception."""
        self.close() if kind is None else self.abort()

    def _attempt_field(self) -> dict[str, int]:
        return {"attempt": self._attempt} if self._attempt else {}

    def _error(self, text: str) -> LinkError:
        return LinkError(self._connection.message(text))

    def _put(self, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        if (failure := self._connection.failure) is not None:
            raise type(failure)(f"{failure}; could not send a {header['kind']} frame")
        if self._connection.closed:
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
        if self._counts(header):
            with self._names:
                self.bytes_up += len(data)
                self.payload_up += sum(tensor.nbytes for tensor in (tensors or {}).values())
        # A goodbye comes after all steps.
        self._connection.put(data, int(header.get("step", self._num_ended_steps + 1)))

    def _take(self, kinds: tuple[str, ...], awaited: str, timeout_s: float | None) -> Frame:
        """Take the next frame of one of the kinds, counting the confirmations that come before it."""
        timeout_s = _GRACE_S + (self.address.step_timeout_s if timeout_s is None else timeout_s)
        step, attempt = self._step, self._attempt
        while True:
            try:
                data = self._connection.take(timeout_s)
            except queue.Empty:
                raise self._error(
                    f"{awaited} did not come within {timeout_s:g} s; raise decoder.step-timeout if this or another "
                    "cluster is merely slow"
                ) from None
            if data is None:
                # A step was dropped: this one, if it has changed since the wait began.
                if self._step is not step or self._attempt != attempt:
                    raise self._error(f"the step was broken off while waiting for {awaited}")
                continue
            if isinstance(data, LinkError):
                raise type(data)(f"{data}; while waiting for {awaited}")
            try:
                frame = decode(data, self.address.max_frame_bytes)
            except FrameError as error:
                raise self._error(str(error)) from None
            if self._counts(frame.header):
                self.bytes_down += len(data)
                self.payload_down += frame.payload_bytes
            if frame.kind == "step_applied":
                self._confirm(int(frame.header["step"]))
            elif frame.kind in ("states", "gradient", "loss", "tied_gradient") and not self._is_due(frame.header):
                continue
            elif frame.kind in kinds:
                return frame
            else:
                raise self._error(f"expected {awaited}, found a {frame.kind} frame")

    def _counts(self, header: Mapping[str, Any]) -> bool:
        """Return whether a frame goes or comes for the first time."""
        with self._names:
            name = _name(header)
            new = name not in self._counted and not 0 < int(header.get("step", 0)) <= self._connection.confirmed
            self._counted.add(name)
            return new

    def _is_due(self, header: Mapping[str, Any]) -> bool:
        """Return whether an answer is of the step's present attempt and no repetition after a cut."""
        current = self._step
        if current is None or header["step"] < current.step or header.get("attempt", 0) != self._attempt:
            return False
        with self._names:
            name = _name(header)
            new = name not in self._answer_names
            self._answer_names.add(name)
            return new

    def _confirm(self, step: int) -> None:
        self._connection.confirm(step)
        with self._names:
            self._counted = {name for name in self._counted if not 0 < name[1] <= step}


def _name(header: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a frame within its round."""
    return header["kind"], header.get("step", 0), header.get("micro_batch"), header.get("name"), header.get("start")
