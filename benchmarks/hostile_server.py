"""A server that answers a control unit's end of the decoder's stream with what it should not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from hostile_frames import WIDTH, Draft, good_answers, mutated

from client_pipeline.link.address import METHOD, SERVICE, DecoderAddress
from client_pipeline.link.base import LinkError
from client_pipeline.link.frames import PROTOCOL_VERSION, encode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.dropout_seed import StepId


class HostileServer:
    """Answers every stream with a welcome, and its first frame with what it was told to."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        handler = grpc.stream_stream_rpc_method_handler(self._serve, None, None)
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _serve(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(frames, None)
        yield encode({"kind": "welcome", "version": PROTOCOL_VERSION, "decoder_sync": "step"})
        next(frames, None)
        yield from self.answers

    def stop(self) -> None:
        """Stop."""
        self._server.stop(0).wait(5)


def attack_control_unit(server: HostileServer, rng: random.Random, frame_limit: int) -> tuple[list[Draft], str, str]:
    """Let a real stream's end read hostile answers to one micro-batch.

    Returns
    -------
    The answers; whether they were ``refused`` or the stream ``closed`` in good order; what should not have happened.
    """
    shape = [2, 3, WIDTH]
    drafts = mutated(rng, good_answers(rng, shape, 1))
    # Both ends are in this process: large ones are cut.
    server.answers = [draft.to_bytes()[: 2**20] for draft in drafts]
    address = DecoderAddress(
        target=server.target, token="t", round=1, cluster=0, step_timeout_s=5.0, max_frame_bytes=frame_limit
    )
    try:
        with DecoderStream.open(address) as stream:
            stream.begin_step(StepId(seed=1, round=1, step=1, cluster=0), 1, 2.0)
            stream.send(0, torch.zeros(shape), torch.ones(2, 3, dtype=torch.bool), {"labels": torch.tensor([1, 1])})
            gradient = stream.receive()
            if list(gradient.tensor.shape) != shape or gradient.tensor.dtype != torch.float32:
                return drafts, "taken", f"a gradient of shape {list(gradient.tensor.shape)}"
            stream.end_step(1.0)
    except LinkError as error:
        return drafts, "refused", str(error) if "memory" in str(error) else ""
    except Exception as error:
        return drafts, "raised", repr(error)
    return drafts, "closed", ""
