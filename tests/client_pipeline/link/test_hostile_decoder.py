"""A server that answers wrongly: the control unit's end says so, and holds no more than what came."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import torch

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.address import METHOD, SERVICE, DecoderAddress
from client_pipeline.link.base import LinkError
from client_pipeline.link.frames import PROTOCOL_VERSION, encode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight
from helpers.decoder_cases import batch_of, step_id

NONE = ActivationCodec()
WELCOME = encode({"kind": "welcome", "version": PROTOCOL_VERSION, "decoder_sync": "step"})
GOODBYE = encode({"kind": "goodbye"})


def applied(step):
    return encode({"kind": "step_applied", "round": 1, "step": step})


def gradient(tensor, **change):
    header = {"kind": "gradient", "round": 1, "step": 1, "micro_batch": 0, "loss_sum": 1.0, "norm_sq": 1.0}
    return encode({**header, **change}, {"gradient": tensor})


@contextmanager
def server_that_says(*script):
    """A real server; ``script`` has, for each frame that comes, what is answered."""

    def serve(frames, _):
        for answers in script:
            next(frames, None)
            yield from answers

    handler = grpc.stream_stream_rpc_method_handler(serve, None, None)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield DecoderAddress(target=f"127.0.0.1:{port}", token="t", round=1, cluster=0, step_timeout_s=5.0)
    finally:
        server.stop(0).wait(120)


def train(address, steps=1, codec=NONE):
    hidden, mask, targets = batch_of(0, 3)
    with DecoderStream.open(address, codec=codec) as stream:
        for step in range(1, steps + 1):
            stream.begin_step(step_id(0, step), 1, target_weight(targets))
            stream.send(0, hidden, mask, targets)
            stream.receive()
            stream.end_step(1.0)


GOOD = gradient(torch.zeros(3, 5, 8))
SECOND = gradient(torch.zeros(3, 5, 8), step=2)


def test_a_server_that_confirms_all_steps_ends_the_round():
    with server_that_says([WELCOME], [GOOD], [applied(1)], [SECOND], [applied(2)], [GOODBYE]) as address:
        train(address, steps=2)


@pytest.mark.parametrize(
    ("script", "confirmed"),
    [
        ([[WELCOME], [GOOD], [], [SECOND], [], [GOODBYE]], 0),
        ([[WELCOME], [GOOD], [applied(1)], [SECOND], [], [GOODBYE]], 1),
        ([[WELCOME], [GOOD], [applied(1)], [SECOND], [], [GOODBYE, applied(2)]], 1),
    ],
    ids=["none", "the first alone", "the last too late"],
)
def test_a_goodbye_before_all_steps_are_confirmed_is_an_error(script, confirmed):
    with server_that_says(*script) as address:
        with pytest.raises(LinkError, match=f"only {confirmed} of 2 steps were confirmed"):
            train(address, steps=2)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("shape", [(3, 5, 9), (3, 5, 10**5), (10**5, 1, 8), (15, 8), (5, 3, 8)])
def test_a_gradient_of_another_shape_is_refused_before_it_is_unpacked(codec, shape, monkeypatch):
    packed = ActivationCodec(codec)
    row = (*shape[:-1], packed.row_bytes(shape[-1]) if codec != "none" else shape[-1])
    wrong = gradient(torch.zeros(row, dtype=torch.float32 if codec == "none" else torch.uint8))
    unpacked = []
    monkeypatch.setattr(ActivationCodec, "decode", lambda _, wire: unpacked.append(wire) or wire)
    with server_that_says([WELCOME], [wrong]) as address:
        with pytest.raises(LinkError, match="the gradient of micro-batch 0, step 1"):
            train(address, codec=packed)
    assert not unpacked


def test_a_gradient_without_bytes_is_refused_whatever_shape_it_claims():
    text = GOOD[8 : 8 + int.from_bytes(GOOD[:8], "little")].replace(b"[3, 5, 8]", b"[3000000000, 0, 8]")
    text = text.replace(b"[0, 480]", b"[0, 0]")
    empty = len(text).to_bytes(8, "little") + text
    with server_that_says([WELCOME], [empty]) as address, pytest.raises(LinkError, match="dimensions of at least 1"):
        train(address)


def test_a_gradient_that_comes_before_its_activations_is_refused():
    with server_that_says([WELCOME, GOOD]) as address, DecoderStream.open(address) as stream:
        stream.begin_step(step_id(0), 1, 1.0)
        with pytest.raises(LinkError, match="before they were sent"):
            stream.receive()
        stream.abort()
