"""The decoder's gRPC service: tokens, TLS and frames around :class:`~strategies.decoder.trainer.DecoderTrainer`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.address import (
    METHOD,
    NEWS_METHOD,
    SERVICE,
    WEIGHTS_METHOD,
    DecoderAddress,
    read_pem,
)
from client_pipeline.link.base import Gradient
from client_pipeline.link.frames import PROTOCOL_VERSION, Frame, FrameError, decode, encode
from client_pipeline.link.hosts import split_address
from client_pipeline.link.keepalive import channel_options
from client_pipeline.link.tied import pieces
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.weights.base_weights import BaseWeights
from strategies.aggregation.accountant import Sent
from strategies.decoder.config import DecoderConfig, check_pair
from strategies.decoder.kept_activations import NAME_LENGTH, KeptActivations
from strategies.decoder.limits import Allowance, HelloGuard, TooManyHellos
from strategies.decoder.member import ClusterSummary, MicroBatch, NotFiniteRefusal, Refusal, Superseded
from strategies.decoder.reception import OpenStream, Reception
from strategies.decoder.revoked_certificates import RevokedCertificates
from strategies.decoder.round import Seat
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer, RoundSummary
from strategies.decoder.weight_source import WeightSource
from strategies.printable import printable

NewsReader = Callable[[int, int, str], None]

_HANDSHAKE_TIMEOUT_S = 15.0
_STOP_S = 5.0


class DecoderService:
    """Serves one decoder over gRPC for as long as the run lasts.

    Parameters
    ----------
    config : addresses and certificates; certificate files are read here
    trainer : receives the frames
    num_clusters : most clusters of a round; every stream takes a thread
    codec : how activations and gradients travel; a CU that declares another is refused
    limits : those of a cluster's step
    on_news : called with cluster, round and text of a control unit's news; raises ValueError for a malformed text
    base : frozen weights, whose files nodes that lack them may pull before round 1; None: there are none
    kept : activations that clusters send once, where they train no TEB; closed with the service. None: none are

    Raises
    ------
    ValueError
        If a certificate file cannot be read, or certificate and key do not belong together.
    """

    def __init__(
        self,
        config: DecoderConfig,
        trainer: DecoderTrainer,
        num_clusters: int,
        codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
        limits: StepLimits = StepLimits(),  # noqa: B008
        on_news: NewsReader = lambda cluster, round_, text: None,
        base: BaseWeights | None = None,
        kept: KeptActivations | None = None,
    ) -> None:
        self.kept = kept
        self.config = config
        self.trainer = trainer
        self.codec = codec
        self.limits = limits
        self.reception = Reception(trainer, codec, num_clusters)
        self._weights = WeightSource(base, self.reception.hellos, config.max_frame_bytes // 2)
        self._on_news = on_news
        self._certificate = read_pem(config.tls_certificate, "decoder.tls-certificate")
        self._key = read_pem(config.tls_key, "decoder.tls-key")
        self._ca = read_pem(config.tls_ca, "decoder.tls-ca")
        if self._certificate is not None:
            check_pair(config.tls_certificate, config.tls_key)
        self._revoked = RevokedCertificates(config.tls_crl, self._ca) if config.tls_crl and self._ca else None
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._address = ""
        self.sent: dict[int, Sent] = {}
        """Activations received in the run, by cluster."""
        self._on_repeat: Callable[[], None] = lambda: None

    def account(self, sent_by_cluster: dict[int, Sent], on_repeat: Callable[[], None]) -> None:
        """Count the clusters' activations in the run's account; called before the first round.

        Parameters
        ----------
        sent_by_cluster : activations so far, by cluster; updated in place
        on_repeat : called when a step comes again, before it is answered
        """
        self.sent, self._on_repeat = sent_by_cluster, on_repeat

    def start(self) -> str:
        """Listen; returns the bound ``host:port``.

        Raises
        ------
        ValueError
            If the port is in use or the host is not of this machine.
        """
        options = [
            *channel_options(self.config.max_frame_bytes),
            # Without this two services on one port would both start, and share its streams.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            # A few bytes that unpack to gigabytes are not unpacked: bit 0 is "as it is".
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_metadata_size", 8192),
            ("grpc.max_concurrent_streams", self.reception.most_streams),
            ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),
        ]
        most = self.reception.most_streams
        threads = ThreadPoolExecutor(most, thread_name_prefix="decoder")
        server = grpc.server(threads, options=options, maximum_concurrent_rpcs=most)
        exchange = grpc.stream_stream_rpc_method_handler(self._serve, None, None)
        news = grpc.unary_unary_rpc_method_handler(self._hear_news, None, None)
        weights = grpc.unary_unary_rpc_method_handler(self._give_weights, None, None)
        methods = {METHOD: exchange, NEWS_METHOD: news, WEIGHTS_METHOD: weights}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        host, port = split_address("decoder.bind", self.config.bind)
        try:
            bound = self._add_port(server)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ValueError(
                f"decoder.bind: cannot listen on {self.config.bind}: the port is in use or the host is not of this "
                "machine; choose another, or port 0 for a free one"
            )
        server.start()
        self._server, self._threads = server, threads
        self._address = f"{host}:{bound}"
        return self._address

    @property
    def hellos(self) -> HelloGuard:
        """Guard of the hello frames, which counts the refused ones."""
        return self.reception.hellos

    @property
    def advertised(self) -> str:
        """``host:port`` that CUs receive."""
        port = self._address.rpartition(":")[2]
        host, colon, own_port = (self.config.advertise or self._address).rpartition(":")
        if not colon:
            return f"{own_port}:{port}"
        return f"{host}:{port if own_port == '0' else own_port}"

    def open_round(
        self, round_: int, clusters: Iterable[int], local_steps: int, tied: Mapping[str, Tensor] | None = None
    ) -> dict[int, DecoderAddress]:
        """Open a round; returns the address for each selected CU. Streams of older rounds are broken off.

        ``tied`` as in :meth:`DecoderTrainer.open_round`.
        """
        clusters = list(clusters)
        self.trainer.open_round(round_, clusters, local_steps, tied)
        return self._addresses(round_, self.reception.open_round(round_, clusters))

    @contextmanager
    def pulls(self, num_nodes: int) -> Iterator[list[DecoderAddress]]:
        """Let nodes pull the files of the frozen weights within the context; yields the address for each node."""
        try:
            yield list(self._addresses(0, self._weights.open(num_nodes)).values())
        finally:
            self._weights.close()

    def _addresses(self, round_: int, tokens: Mapping[int, str]) -> dict[int, DecoderAddress]:
        root = self._ca or self._certificate or b""
        return {
            cluster: DecoderAddress(
                target=self.advertised,
                token=token,
                round=round_,
                cluster=cluster,
                join_timeout_s=float(self.trainer.join_timeout_s),
                step_timeout_s=float(self.trainer.step_timeout_s),
                max_frame_bytes=self.config.max_frame_bytes,
                tls=self._certificate is not None,
                root_certificate=root.decode(),
            )
            for cluster, token in tokens.items()
        }

    def end_round(self) -> dict[int, ClusterSummary]:
        """Let nobody in any more; the round's tokens are worth nothing. See :meth:`DecoderTrainer.end_round`."""
        self.reception.close_round()
        return self.trainer.end_round()

    def finish_round(self, weights: Mapping[int, float] | None = None) -> RoundSummary:
        """Close the round; its tokens are worth nothing from now on. See :meth:`DecoderTrainer.finish_round`."""
        self.reception.close_round()
        return self.trainer.finish_round(weights)

    def __enter__(self) -> DecoderService:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def stop(self) -> None:
        """Break off all streams and stop listening."""
        if self._server is not None:
            self._server.stop(grace=0).wait(_STOP_S)
            self._server = None
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        if self.kept is not None:
            self.kept.close()

    def _add_port(self, server: grpc.Server) -> int:
        if self._certificate is None:
            return int(server.add_insecure_port(self.config.bind))
        credentials = grpc.ssl_server_credentials(
            [(self._key, self._certificate)], root_certificates=self._ca, require_client_auth=self._ca is not None
        )
        return int(server.add_secure_port(self.config.bind, credentials))

    def _serve(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one stream. An error of the CU ends the stream with a reason, never the service."""
        stream: OpenStream | None = None
        try:
            if self._revoked is not None:
                self._revoked.check(context.auth_context())
            stream = self.reception.greet(frames, context)
            if stream is None:
                return
            seat = self.reception.seat(stream, context)
            yield from self._welcome(seat, stream)
            allowance = Allowance(self.config.frames_per_second, 2 * self.config.frames_per_second)
            for data in frames:
                self.reception.heard(stream)
                if wait_s := allowance.take():
                    # Unread frames hold the sender back.
                    time.sleep(wait_s)
                frame = decode(data, self.config.max_frame_bytes)
                del data
                yield from self._answers(frame, seat, stream.round)
                if frame.kind in ("bye", "leave"):
                    return
                del frame  # frees its memory before the next one comes
            # The frames ended without a goodbye, as they do after a cut.
        except Superseded:
            pass  # the cluster goes on with another stream
        except FrameError as error:
            self._refuse(stream, context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooManyHellos as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except PermissionError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, printable(str(error)))
        except NotFiniteRefusal as error:
            self._refuse(stream, context, grpc.StatusCode.OUT_OF_RANGE, str(error))
        except Refusal as error:
            self._refuse(stream, context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            self.reception.release(stream)

    def _hear_news(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Take a control unit's news message, which comes beside its stream."""
        with self._single_call(context):
            with self.reception.news(data, context) as header:
                self._on_news(header["cluster"], header["round"], header["text"])
        return b""

    def _give_weights(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Return a piece of the frozen weights' files to the node that pulls it."""
        with self._single_call(context):
            piece = self._weights.piece(data, context)
        return piece

    @contextmanager
    def _single_call(self, context: grpc.ServicerContext) -> Iterator[None]:
        """End a call beside the streams with its reason if it is refused."""
        try:
            if self._revoked is not None:
                self._revoked.check(context.auth_context())
            yield
        except TooManyHellos as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except PermissionError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, printable(str(error)))
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(error)))

    def _refuse(
        self, stream: OpenStream | None, context: grpc.ServicerContext, code: grpc.StatusCode, reason: str
    ) -> None:
        """End a stream with a reason; its cluster has left the round."""
        reason = printable(reason)
        if stream is not None:
            stream.refuse(reason)
        context.abort(code, reason)

    def _welcome(self, seat: Seat, stream: OpenStream) -> Iterator[bytes]:
        """Greet a stream; a step that was closed before the cut is confirmed when it is taken."""
        state = {"decoder_sync": seat.sync, "resume": stream.resume, "step": seat.step, "closed": int(seat.closed)}
        if self.kept is not None:
            state["store"] = self.kept.identity
        yield encode({"kind": "welcome", "version": PROTOCOL_VERSION, **state})
        if seat.closed:
            seat.await_step(seat.step)
            yield encode({"kind": "step_applied", "round": stream.round, "step": seat.step})

    def _answers(self, frame: Frame, seat: Seat, round_: int) -> Iterator[bytes]:
        header = frame.header
        if frame.kind == "bye":
            seat.finish()
            yield encode({"kind": "goodbye"})
            return
        if frame.kind == "leave":
            seat.leave(printable(str(header["reason"])))
            return
        first, kinds = "micro_batch", {"tied", "micro_batch", "step_end"}
        if self.trainer.copies.shared.returns_states:
            first, kinds = "forward", {"forward", "states_gradient", "step_end"}
        elif self.kept is not None:
            kinds.add("recall")
        if frame.kind not in kinds:
            raise FrameError(f"expected a {first}, step_end or bye frame, found {frame.kind}")
        if header["round"] != round_:
            raise Refusal(f"this stream is of round {round_}, found a frame of round {header['round']}")
        place = {"round": round_, "step": header["step"]}
        attempt = int(header.get("attempt", 0))
        if frame.kind == "tied":
            name, start, rows = header["name"], header["start"], frame.tensors["rows"]
            seat.take_tied(header["step"], name, start, rows, attempt=attempt)
        elif frame.kind == "step_end":
            seat.close_step(header["step"], header["scale"])
            yield encode({"kind": "step_applied", **place})
        elif frame.kind == "forward":
            states = seat.forward(self._micro_batch(frame, seat.cluster))
            place |= {"attempt": attempt, "micro_batch": header["micro_batch"]}
            yield encode({"kind": "states", **place}, {"states": self.codec.encode(states)})
        elif frame.kind == "states_gradient":
            self.limits.check_wire("gradient", frame.tensors["gradient"], self.codec)
            gradient_BTD = self._decoded("gradient", frame.tensors["gradient"])
            answer = seat.backward(header["step"], header["micro_batch"], gradient_BTD, attempt)
            yield self._gradient(answer, place | {"attempt": attempt})
        else:
            place["attempt"] = attempt
            if frame.kind == "recall":
                yield self._loss(seat.micro_batch(self._recalled(frame, seat.cluster)), place, kept=True)
            elif self.kept is not None:
                answer = seat.micro_batch(self._micro_batch(frame, seat.cluster))
                yield self._loss(answer, place, kept=self.kept.put(seat.cluster, _names(frame), frame.tensors))
            else:
                yield self._gradient(seat.micro_batch(self._micro_batch(frame, seat.cluster)), place)
            if header["micro_batch"] == header["num_micro_batches"] - 1:
                for name, start, rows in pieces(seat.tied_gradient(), self.config.max_frame_bytes):
                    yield encode({"kind": "tied_gradient", **place, "name": name, "start": start}, {"rows": rows})

    def _recalled(self, frame: Frame, cluster: int) -> MicroBatch:
        """Read a micro-batch of examples that are kept; raises as :meth:`_micro_batch`."""
        header, names = frame.header, _names(frame)
        assert self.kept is not None
        self.limits.check_weights(header["weight"], header.get("total_weight"), header["num_micro_batches"])
        # They are no further release; their number is bounded as that of others.
        sent = self.sent.setdefault(cluster, Sent())
        sent.count_step(header["micro_batch"], len(names))
        self.limits.check_examples(sent.step_examples)
        sent.recalled += len(names)
        return self._batch(Frame(header, self.kept.get(cluster, names)), cluster)

    def _micro_batch(self, frame: Frame, cluster: int) -> MicroBatch:
        """Read a micro-batch; raises Refusal if it, or its step, is more than the limits admit."""
        header, mask_BT = frame.header, frame.tensors["mask"]
        self.limits.check(frame.tensors["hidden"], mask_BT, self.codec)
        if frame.kind == "micro_batch":
            self.limits.check_targets(frame.targets, len(mask_BT))
        self.limits.check_weights(header["weight"], header.get("total_weight"), header["num_micro_batches"])
        # Count it now, whatever the decoder makes of it: it was received.
        sent = self.sent.setdefault(cluster, Sent())
        if sent.add((header["round"], header["step"]), header["micro_batch"], mask_BT):
            self._on_repeat()
        self.limits.check_examples(sent.step_examples)
        if self.kept is not None and len(names := _names(frame)) != len(mask_BT):
            raise Refusal(f"names: expected one of each of {len(mask_BT)} examples, found {len(names)}")
        return self._batch(frame, cluster)

    def _batch(self, frame: Frame, cluster: int) -> MicroBatch:
        header, mask_BT = frame.header, frame.tensors["mask"]
        hidden_BTD = self._decoded("hidden", frame.tensors["hidden"])
        return MicroBatch(
            step=StepId(seed=header["seed"], round=header["round"], step=header["step"], cluster=cluster),
            micro_batch=header["micro_batch"],
            num_micro_batches=header["num_micro_batches"],
            weight=header["weight"],
            total_weight=header.get("total_weight"),
            hidden_BTD=hidden_BTD,
            mask_BT=mask_BT,
            targets=frame.targets,
            attempt=header.get("attempt", 0),
        )

    def _decoded(self, name: str, wire: Tensor) -> Tensor:
        try:
            return self.codec.decode(wire)
        except ValueError as error:
            raise Refusal(f"{name}: {error}") from None

    def _loss(self, answer: Gradient, place: dict[str, int], *, kept: bool) -> bytes:
        header = {"kind": "loss", **place, "micro_batch": answer.micro_batch, "loss_sum": answer.loss_sum}
        if answer.norm_sq is not None:
            header["norm_sq"] = answer.norm_sq
        return encode({**header, "kept": int(kept)})

    def _gradient(self, gradient: Gradient, place: dict[str, int]) -> bytes:
        header = {"kind": "gradient", **place, "micro_batch": gradient.micro_batch, "loss_sum": gradient.loss_sum}
        if gradient.norm_sq is not None:
            header["norm_sq"] = gradient.norm_sq
        return encode(header, {"gradient": self.codec.encode(gradient.tensor)})


def _names(frame: Frame) -> list[str]:
    """Return the names of a frame's examples; each name takes room, however short its example."""
    names = str(frame.header.get("names", "")).split(",")
    if any(len(name) > NAME_LENGTH for name in names):
        raise Refusal(f"names: expected at most {NAME_LENGTH} characters each, separated by commas")
    return [name for name in names if name]
