"""A decoder stream that is cut, at any moment, and opened again: nothing counts twice, and the others need not know."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from client_pipeline.link.address import LinkCertificates
from client_pipeline.link.base import LinkError, NotFiniteLink
from client_pipeline.link.reopened_connection import give_up
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.decoder_cases import (
    all_at_once,
    batch_of,
    cut,
    service_of,
    step_id,
    train_round,
    train_step,
)
from helpers.patience import eventually

ADAM = OptimizerConfig(name="adamw", lr=0.01)
STEPS = 3
PIECES = 3


def cut_now(stream):
    """Cut, and wait until the stream is open again."""
    before = len(stream.cuts)
    stream.cut()
    eventually(lambda: len(stream.cuts) > before, words=lambda: "the stream was not opened again")


def train(address, at=None, gap=cut_now):
    """A cluster's round; ``at`` (step, micro-batch, moment) says when its stream is cut. Gradients and the stream."""

    def moment(step, i, name):
        if at == (step, i, name):
            gap(stream)

    gradients = []
    with DecoderStream.open(address) as stream:
        for step in range(1, STEPS + 1):
            batch = batch_of(address.cluster, 5, seed=step)
            pieces = cut(batch, PIECES)
            stream.begin_step(step_id(address.cluster, step), PIECES, target_weight(batch[2]))
            for i, piece in enumerate(pieces):
                stream.send(i, *piece)
                moment(step, i, "sent")
            for i in range(PIECES):
                gradients.append(stream.receive())
                moment(step, i, "received")
            stream.end_step(1.0)
            moment(step, 0, "ended")
    return gradients, stream


def both(service, at=None, gap=cut_now):
    addresses = service.open_round(1, [0, 1], STEPS)
    first, second = all_at_once(lambda: train(addresses[0], at, gap), lambda: train(addresses[1]))
    for outcome in (first, second):
        assert isinstance(outcome, tuple), outcome
    return first, second, service.finish_round()


@pytest.fixture(scope="module")
def undisturbed():
    with service_of(optimizer=ADAM) as service:
        return both(service)


@pytest.mark.parametrize(
    "at", [(1, 0, "sent"), (2, 2, "sent"), (2, 0, "received"), (3, 2, "received"), (2, 0, "ended"), (3, 0, "ended")]
)
def test_a_cut_changes_neither_gradients_nor_the_decoder_nor_any_count(undisturbed, at):
    (expected, quiet), _, summary = undisturbed
    with service_of(optimizer=ADAM) as service:
        (found, stream), _, disturbed = both(service, at)
    assert len(stream.cuts) == 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.norm_sq == other.norm_sq
        assert (one.micro_batch, one.loss_sum) == (other.micro_batch, other.loss_sum)
    assert disturbed.clusters == summary.clusters
    assert all(torch.equal(disturbed.head[name], summary.head[name]) for name in summary.head)
    for count in ("bytes_up", "payload_up", "payload_down"):
        assert getattr(stream, count) == getattr(quiet, count), count


def test_frames_sent_while_the_stream_is_away_arrive_once_and_in_order(undisturbed):
    (expected, _), _, summary = undisturbed

    def gap(stream):
        stream.cut()  # and go on at once

    with service_of(optimizer=ADAM) as service:
        (found, stream), _, disturbed = both(service, (2, 0, "sent"), gap)
    assert len(stream.cuts) == 1 and stream.cuts[0][2] > 0
    assert [g.loss_sum for g in found] == [g.loss_sum for g in expected]
    assert all(torch.equal(disturbed.head[name], summary.head[name]) for name in summary.head)


def test_a_cluster_that_waits_at_the_barrier_may_be_cut_there():
    with service_of(optimizer=ADAM) as service:
        addresses = service.open_round(1, [0, 1], 1)
        gone_on = threading.Event()

        def early():
            with DecoderStream.open(addresses[0]) as stream:
                train_step(stream, step_id(0), batch_of(0, 3), 1)
                time.sleep(0.3)  # the decoder has closed the step, and waits for the other cluster
                cut_now(stream)
                gone_on.set()

        def late():
            with DecoderStream.open(addresses[1]) as stream:
                assert gone_on.wait(120)
                train_step(stream, step_id(1), batch_of(1, 3), 1)

        assert all_at_once(early, late) == [None, None]
        assert [c.steps for c in service.finish_round().clusters.values()] == [1, 1]


def test_a_step_begun_again_forgets_what_it_had_sent_before(undisturbed):
    (expected, quiet), _, summary = undisturbed
    with service_of(optimizer=ADAM) as service:
        addresses = service.open_round(1, [0, 1], STEPS)

        def restless():
            gradients = []
            with DecoderStream.open(addresses[0]) as stream:
                for step in range(1, STEPS + 1):
                    batch = batch_of(0, 5, seed=step)
                    # Other activations, of which some answers are taken and some are on their way.
                    stream.begin_step(step_id(0, step), PIECES, target_weight(batch[2]))
                    for i, (hidden, *rest) in enumerate(cut(batch, PIECES)):
                        stream.send(i, 2 * hidden, *rest)
                    stream.receive()
                    stream.drop_step()
                    if step == 2:
                        cut_now(stream)
                    gradients += train_step(stream, step_id(0, step), batch, PIECES)
            return gradients, stream

        (found, stream), _ = all_at_once(restless, lambda: train(addresses[1]))
        disturbed = service.finish_round()
    assert [g.loss_sum for g in found] == [g.loss_sum for g in expected]
    assert disturbed.clusters == summary.clusters
    assert all(torch.equal(disturbed.head[name], summary.head[name]) for name in summary.head)
    assert (stream.payload_up, stream.payload_down) == (quiet.payload_up, quiet.payload_down)


def test_a_cluster_that_does_not_come_back_is_left_behind(monkeypatch):
    monkeypatch.setattr("strategies.decoder.round.AWAY_S", 0.5)
    monkeypatch.setattr("client_pipeline.link.reopened_connection._PAUSES_S", (60.0,))
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        away = DecoderStream.open(addresses[1])
        away.cut()
        train_round(addresses[0], [batch_of(0, 3)])
        summary = service.finish_round()
    assert summary.clusters[0].steps == 1
    assert summary.clusters[1].departure == "its stream broke off and did not come back within 0.5 s"


def test_a_stream_that_is_cut_for_a_while_is_opened_again_when_that_is_over():
    with service_of(num_clusters=1) as service, DecoderStream.open(service.open_round(1, [0], 2)[0]) as stream:
        train_step(stream, step_id(0, 1), batch_of(0, 3), 1)
        stream.cut(0.5)
        train_step(stream, step_id(0, 2), batch_of(0, 3), 1)
        [(_, seconds, _)] = stream.cuts
    assert seconds >= 0.4


def test_whoever_holds_the_rounds_token_can_say_that_the_control_unit_is_gone():
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        stream = DecoderStream.open(addresses[1])  # its process dies, and cannot say so itself
        assert not give_up(replace(addresses[1], token="wrong"), LinkCertificates(), "no")
        assert give_up(addresses[1], LinkCertificates(), "its control unit was killed")
        train_round(addresses[0], [batch_of(0, 3)])
        assert service.finish_round().clusters[1].departure == "its control unit was killed"
        stream.abort()


def test_a_resume_token_opens_one_stream_of_its_own_round():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        with DecoderStream.open(address) as stream:
            first = stream._connection._resume
            cut_now(stream)
            second = stream._connection._resume
            assert len({address.token, first, second}) == 3
            # Only now does the decoder know that the second one has arrived.
            train_step(stream, step_id(0), batch_of(0, 3), 1)
            with pytest.raises(LinkError, match="token"):
                DecoderStream.open(replace(address, token=first))
        service.finish_round()
        service.open_round(2, [0], 1)
        for token in (first, second):
            with pytest.raises(LinkError, match="token"):
                DecoderStream.open(replace(address, token=token, round=2))


def test_activations_that_are_not_finite_are_told_apart_from_other_refusals():
    with service_of(num_clusters=1) as service:
        hidden, mask, targets = batch_of(0, 3)
        with DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream:
            with pytest.raises(NotFiniteLink, match="holds NaN or Inf"):
                train_step(stream, step_id(0), (hidden * torch.nan, mask, targets), 1)
            stream.abort()
