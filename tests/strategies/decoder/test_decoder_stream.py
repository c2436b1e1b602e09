"""Two clusters and the decoder's service over real gRPC streams."""

import re
import threading
from dataclasses import replace

import grpc
import pytest
import torch

from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.base import LinkError
from client_pipeline.link.frames import PROTOCOL_VERSION, encode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.decoder_cases import (
    all_at_once,
    assert_still_serves,
    batch_of,
    central_step,
    cut,
    first_frame,
    head_trainer,
    service_of,
    step_id,
    train_round,
    train_step,
)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_two_clusters_equal_one_central_step_on_the_joint_batch():
    batches = [batch_of(0, 5), batch_of(1, 3)]  # 5 and 3 examples with other lengths: unequal weights, ragged pieces
    expected, gradients = central_step(head_trainer().head, [(batch, 1.0) for batch in batches])
    with service_of() as service:
        addresses = service.open_round(1, [0, 1], 1)
        results = all_at_once(*(lambda c=c: train_round(addresses[c], [batches[c]]) for c in (0, 1)))
        summary = service.finish_round()
    assert_close(summary.head, expected)
    for cluster, (batch, gradient) in enumerate(zip(batches, gradients, strict=True)):
        answers = results[cluster][0]
        torch.testing.assert_close(torch.cat([a.tensor for a in answers]), gradient, atol=1e-6, rtol=1e-6)
        weight = target_weight(batch[2])
        assert summary.clusters[cluster].weight == weight
        assert summary.clusters[cluster].loss == pytest.approx(sum(a.loss_sum for a in answers) / weight)
        assert [a.norm_sq is None for a in answers] == [True, False]


def test_each_cluster_is_scaled_by_its_own_clipping_factor():
    batches, scales = [batch_of(0, 4), batch_of(1, 3)], [0.25, 1.0]
    expected, _ = central_step(head_trainer().head, list(zip(batches, scales, strict=True)))
    with service_of() as service:
        addresses = service.open_round(1, [0, 1], 1)

        def train(cluster):
            with DecoderStream.open(addresses[cluster]) as stream:
                return train_step(stream, step_id(cluster), batches[cluster], 3, scales[cluster])

        gradients = all_at_once(lambda: train(0), lambda: train(1))
        assert_close(service.finish_round().head, expected)
    # The norm that the CU clips by is that of g_n, the gradient of its own mean loss.
    trainer = head_trainer()
    trainer.gradient(step_id(0), 0, *batches[0], target_weight(batches[0][2]))
    assert gradients[0][-1].norm_sq == pytest.approx(trainer.gradient_norm_sq(0), rel=1e-5)


def test_a_run_repeats_bit_for_bit_whoever_comes_first():
    adam = OptimizerConfig(name="adamw", lr=0.01)

    def run(first):
        with service_of(num_clusters=3, optimizer=adam) as service:
            addresses = service.open_round(1, [0, 1, 2], 2)
            ahead = threading.Event()

            def train(cluster):
                with DecoderStream.open(addresses[cluster]) as stream:
                    if cluster != first:
                        assert ahead.wait(120)
                    for step in (1, 2):
                        pieces = cut(batch_of(cluster, 4, seed=step), 2)
                        stream.begin_step(step_id(cluster, step), 2, sum(target_weight(p[2]) for p in pieces))
                        for i, piece in enumerate(pieces):
                            stream.send(i, *piece)
                            stream.receive()
                        ahead.set()
                        stream.end_step(1.0)

            assert all_at_once(*(lambda c=c: train(c) for c in range(3))) == [None] * 3
            return service.finish_round().head

    one, other = run(first=0), run(first=2)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": "wrong"}, "token is not one of cluster 0"),
        ({"cluster": 1}, "token is not one of cluster 1"),
        ({"cluster": 9}, "token is not one of cluster 9"),
        ({"round": 2}, "token is not one of cluster 0 in round 2"),
    ],
)
def test_a_wrong_token_is_refused_and_disturbs_nobody(change, message):
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        with pytest.raises(LinkError, match=f"decoder at {addresses[0].target} .*refused.*{message}"):
            DecoderStream.open(replace(addresses[0], **change))
        all_at_once(*(lambda c=c: train_round(addresses[c], [batch_of(c, 3)]) for c in (0, 1)))
        assert all(summary.departure is None for summary in service.finish_round().clusters.values())


def test_a_token_is_good_for_one_stream_and_one_round():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        with DecoderStream.open(address) as stream:
            with pytest.raises(LinkError, match="token of cluster 0 has been used"):
                DecoderStream.open(address)
            train_step(stream, step_id(0), batch_of(0, 3), 1)
        with pytest.raises(LinkError, match="has been used"):
            DecoderStream.open(address)
        service.finish_round()
        with pytest.raises(LinkError, match="the round has ended"):
            DecoderStream.open(address)
        assert_still_serves(service, 2)
        with pytest.raises(LinkError, match="token is not one of cluster 0 in round 1"):
            DecoderStream.open(address)


def test_a_stream_that_outlives_its_round_is_refused_with_the_reason():
    with service_of(num_clusters=1) as service:
        stream = DecoderStream.open(service.open_round(1, [0], 1)[0])
        service.finish_round()
        stream.begin_step(step_id(0), 1, 1)
        stream.send(0, *batch_of(0, 1))
        with pytest.raises(LinkError, match="round 1 of the decoder is not open: it has ended"):
            stream.receive()
        stream.close()
        assert_still_serves(service, 2)


BROKEN = torch.zeros(3, 5, 8)
BROKEN[1, 2, 3] = torch.nan

REFUSED = {
    "another round": ([first_frame(round=2)], "this stream is of round 1, found a frame of round 2"),
    "a later step": ([first_frame(step=2)], "expected step 1, found step 2"),
    "a step too many": ([first_frame(step=3)], "local-steps = 2, found step 3"),
    "a later micro-batch": ([first_frame(micro_batch=1, total_weight=None)], "expected micro-batch 0, found 1"),
    "a micro-batch again": ([first_frame(), first_frame()], "expected micro-batch 1, found 0"),
    "another m": (
        [first_frame(), first_frame(micro_batch=1, num_micro_batches=3, total_weight=None)],
        "expected 2 micro-batches, found 3",
    ),
    "no total weight": ([first_frame(total_weight=None)], "first micro-batch of a step.*carries the total weight"),
    "a false weight": ([first_frame(weight=99.0)], "weight: expected .* as the labels say, found 99"),
    "a step without a target": (
        [first_frame(**{"target.labels": torch.full((3, 4), -100), "weight": 0.0, "total_weight": 0.0})],
        "carries the total weight, above 0; found 0.0",
    ),
    "NaN": ([first_frame(hidden=BROKEN)], "hidden: micro-batch 0 holds NaN or Inf"),
    "Inf": ([first_frame(hidden=torch.full((3, 5, 8), torch.inf))], "holds NaN or Inf"),
    "an overflow": ([first_frame(hidden=torch.full((3, 5, 8), 3e38))], "is not finite: training diverged"),
    "flat activations": ([first_frame(hidden=torch.zeros(3, 40))], r"hidden: expected floats \[B, T, D\]"),
    "more weight than a step may have": (
        [first_frame(total_weight=2.0**16 * 100 + 1)],
        "a step weighs at most 6553600",
    ),
    "another mask": ([first_frame(mask=torch.ones(3, 4, dtype=torch.bool))], r"mask: expected bool \[3, 5\]"),
    "unknown labels": (
        [first_frame(**{"target.labels": torch.full((3, 4), 99), "weight": 12.0})],
        "target.labels: expected labels below 13, found 99",
    ),
    "an early end": (
        [first_frame(), encode({"kind": "step_end", "round": 1, "step": 1, "scale": 1.0})],
        "after 1 of 2",
    ),
    "an end alone": ([encode({"kind": "step_end", "round": 1, "step": 1, "scale": 1.0})], "after 0 of 0"),
    "an early goodbye": ([first_frame(), encode({"kind": "bye"})], "goodbye before step 1 was closed"),
    "a second hello": (
        [encode({"kind": "hello", "version": PROTOCOL_VERSION, "token": "", "round": 1, "cluster": 0})],
        "expected a micro_batch, step_end or bye frame, found hello",
    ),
    "garbage": ([b"\x80\x04K\x01."], "cut short"),
    "oversized": ([first_frame(hidden=torch.zeros(3, 5, 20_000))], "larger than max"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_frame_is_refused_with_its_reason_and_the_service_still_serves(case):
    frames, reason = REFUSED[case]
    with service_of(num_clusters=1, max_frame_bytes=2**18) as service:
        address = service.open_round(1, [0], 2)[0]
        hello = encode({"kind": "hello", "version": PROTOCOL_VERSION, "token": address.token, "round": 1, "cluster": 0})
        with grpc.insecure_channel(address.target) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([hello, *frames]), timeout=120)
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
        found = refusal.value.details()
        assert re.search(reason, found), found
        assert service.finish_round().clusters[0].departure is not None
        assert_still_serves(service, 2)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode({"kind": "bye"}), "expected a hello frame first, found bye"),
        (b"", "cut short"),
        (
            encode({"kind": "hello", "version": 99, "token": "", "round": 1, "cluster": 0}),
            "protocol version: expected 2",
        ),
        (
            encode({"kind": "hello", "version": PROTOCOL_VERSION, "token": "x" * 20_000, "round": 1, "cluster": 0}),
            "at most 16384",
        ),
    ],
    ids=["bye", "nothing", "version", "oversized"],
)
def test_a_stream_without_a_proper_hello_is_refused(first, reason):
    with service_of(num_clusters=1) as service:
        with grpc.insecure_channel(service.advertised) as channel, pytest.raises(grpc.RpcError) as refusal:
            list(channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([first]), timeout=120))
        assert reason in refusal.value.details()
        assert_still_serves(service, 1)


def test_a_frame_too_large_for_the_decoder_is_named_before_it_is_sent():
    with service_of(num_clusters=1, max_frame_bytes=2**16) as service:
        with DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream:
            stream.begin_step(step_id(0), 1, 100)
            with pytest.raises(LinkError, match="frame has .* bytes, at most 65536 .*max-frame-bytes"):
                stream.send(0, *batch_of(0, 100, source=100))
        service.finish_round()
        assert_still_serves(service, 2)


def test_a_decoder_that_is_not_there_is_named():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
    with pytest.raises(LinkError, match=f"decoder at {address.target} .*cannot be reached"):
        DecoderStream.open(address)


def test_a_decoder_that_goes_away_ends_every_wait(monkeypatch):
    monkeypatch.setattr("client_pipeline.link.reopened_connection.REOPEN_S", 1.0)
    with service_of(num_clusters=2) as service:
        stream = DecoderStream.open(service.open_round(1, [0, 1], 1)[0])
        train_step(stream, step_id(0), batch_of(0, 3), 1)
        service.stop()
        # The step was closed here, but the decoder never took it: the CU must not report it as trained.
        with pytest.raises(LinkError, match="the stream|cannot be reached, or went away"):
            stream.close()
        stream.begin_step(step_id(0, 2), 1, 1)
        with pytest.raises(LinkError):
            stream.send(0, *batch_of(0, 1))


def test_a_cu_that_trains_alone_equals_one_behind_the_stream():
    trainer = head_trainer()
    local = LocalDecoder(trainer, local_steps=1, timeout_s=5.0)
    alone = train_step(local, step_id(0), batch_of(0, 5), 2, scale=0.5)
    local.close()
    with service_of(num_clusters=1) as service, DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream:
        served = train_step(stream, step_id(0), batch_of(0, 5), 2, scale=0.5)
        stream.close()
        weights = service.finish_round().head
    for one, other in zip(alone, served, strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.norm_sq == other.norm_sq
        assert (one.micro_batch, one.loss_sum) == (other.micro_batch, other.loss_sum)
    assert all(torch.equal(weights[name], p) for name, p in trainer.parameters.items())
