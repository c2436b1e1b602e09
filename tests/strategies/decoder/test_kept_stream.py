"""``compression.cache-gb`` on the decoder's stream: activations that are sent once, and what is refused."""

import grpc
import pytest
import torch

from client_pipeline.link.base import LinkError
from client_pipeline.link.frames import encode
from client_pipeline.link.kept_examples import KeptExamples
from client_pipeline.link.privacy import NoiseSource, PrivateLink
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight
from helpers.decoder_cases import LONGEST, assert_still_serves, batch_of, cut, first_frame, service_of, step_id
from helpers.raw_streams import call, hello
from strategies.decoder.kept_activations import KeptActivations

MIB = 1 << 20
NAMES = [["a", "b", "c"], ["d", "e"]]


def send(link, step, batch):
    """Send a step of two micro-batches whose examples are named; returns its gradients."""
    pieces = cut(batch, len(NAMES))
    link.begin_step(step, len(NAMES), target_weight(batch[2]))
    for i, piece in enumerate(pieces):
        link.name_examples(i, NAMES[i])
        link.send(i, *piece)
    return [link.receive() for _ in pieces]


def recall(link, step, batch):
    """The same of activations that the server keeps; returns its losses."""
    link.begin_step(step, len(NAMES), target_weight(batch[2]))
    for i, (part, (_, _, targets)) in enumerate(zip(NAMES, cut(batch, len(NAMES)), strict=True)):
        link.recall(i, part, target_weight(targets))
    return [link.receive_loss() for _ in NAMES]


def trained(kept, recalls, sync="step", cuts=False, local_steps=3):
    """The decoder after steps of one batch, the losses, and the stream."""
    batch = batch_of(0, 5)
    names = KeptExamples() if kept else None
    with service_of(1, sync, kept=KeptActivations(MIB) if kept else None) as service:
        address = service.open_round(1, [0], local_steps)[0]
        losses = []
        with DecoderStream.open(address, kept=names) as stream:
            for number in range(1, local_steps + 1):
                step = step_id(0, number)
                if recalls and number > 1:
                    losses += [loss for _, loss, _ in recall(stream, step, batch)]
                elif kept:
                    gradients = send(stream, step, batch)
                    assert not any(gradient.tensor.any() for gradient in gradients)
                    assert names.has(NAMES[0] + NAMES[1])
                    losses += [gradient.loss_sum for gradient in gradients]
                else:
                    stream.begin_step(step, 2, target_weight(batch[2]))
                    for i, piece in enumerate(cut(batch, 2)):
                        stream.send(i, *piece)
                    losses += [stream.receive().loss_sum for _ in range(2)]
                if cuts:
                    stream.cut()
                stream.end_step(1.0)
        return service.finish_round({0: 1.0}).head, losses, stream


@pytest.mark.parametrize("sync", ["step", "round"])
@pytest.mark.parametrize("cuts", [False, True])
def test_the_decoder_learns_the_same_from_activations_that_it_keeps(sync, cuts):
    expected, losses, sent = trained(kept=False, recalls=False, sync=sync)
    head, found, stream = trained(kept=True, recalls=True, sync=sync, cuts=cuts)
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(head[name], value, rtol=1e-5, atol=1e-7, msg=name)
    # Of three steps one sends activations, and none has gradients back.
    assert stream.payload_up * 3 == sent.payload_up
    assert stream.payload_down == 0 < sent.payload_down


def test_noise_is_that_of_the_only_time_that_an_example_was_sent():
    batch, names = batch_of(0, 5), KeptExamples()
    privacy = PrivacyConfig(activation_clip=1.0, activation_noise=0.5)
    with service_of(1, kept=KeptActivations(MIB)) as service:
        address = service.open_round(1, [0], 2)[0]
        with DecoderStream.open(address, kept=names) as stream:
            link = PrivateLink(stream, privacy, NoiseSource(3))
            first = send(link, step_id(0, 1), batch)
            link.end_step(0.0)
            again = recall(link, step_id(0, 2), batch)
            link.end_step(0.0)
        assert [loss for _, loss, _ in again] == pytest.approx([gradient.loss_sum for gradient in first], rel=1e-5)
        sent = service.sent[0]
        assert (sent.examples, sent.recalled, sent.repeats) == (5, 5, 0)
        service.finish_round({0: 1.0})


def test_a_step_that_is_begun_again_is_recalled_again():
    batch, names = batch_of(0, 5), KeptExamples()
    with service_of(1, kept=KeptActivations(MIB)) as service:
        with DecoderStream.open(service.open_round(1, [0], 2)[0], kept=names) as stream:
            send(stream, step_id(0, 1), batch)
            stream.end_step(1.0)
            recall(stream, step_id(0, 2), batch)
            stream.drop_step()
            recall(stream, step_id(0, 2), batch)
            stream.end_step(1.0)
        assert service.finish_round({0: 1.0}).clusters[0].steps == 2


def test_another_servers_store_has_to_be_filled_anew():
    batch, names = batch_of(0, 5), KeptExamples()
    for _ in range(2):
        with service_of(1, kept=KeptActivations(MIB)) as service:
            with DecoderStream.open(service.open_round(1, [0], 1)[0], kept=names) as stream:
                assert not names.has(["a"])
                send(stream, step_id(0, 1), batch)
                stream.end_step(1.0)
            assert names.has(["a"])
            service.finish_round({0: 1.0})


def test_a_store_without_room_says_so_and_the_run_goes_on():
    batch, names = batch_of(0, 5), KeptExamples()
    with service_of(1, kept=KeptActivations(1)) as service:
        with DecoderStream.open(service.open_round(1, [0], 1)[0], kept=names) as stream:
            send(stream, step_id(0, 1), batch)
            stream.end_step(1.0)
        assert not names.has(["a"])
        assert service.finish_round({0: 1.0}).clusters[0].steps == 1


def recall_frame(names, **change):
    header = {"kind": "recall", "round": 1, "step": 1, "micro_batch": 0, "num_micro_batches": 1, "weight": 2.0}
    return encode(header | {"seed": 0, "total_weight": 2.0, "names": names} | change)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (lambda: recall_frame("a,b"), "recall: expected examples that are kept, found 2 of 2 others"),
        (lambda: recall_frame(",,,"), "recall: expected examples that are kept, found 0 of 0 others"),
        (lambda: recall_frame("a" * 33), "names: expected at most 32 characters each, separated by commas"),
        (lambda: recall_frame(",".join("abcdefghi")), "a step has at most 8 examples, found 9"),
        (lambda: recall_frame("a", num_micro_batches=9), "a step has at most 8 micro-batches, as examples, found 9"),
        (lambda: recall_frame("a", weight=1e9), f"weight: a step weighs at most {8 * LONGEST}"),
        (lambda: first_frame(), "names: expected one of each of 3 examples, found 0"),
        (lambda: first_frame(names="a,b"), "names: expected one of each of 3 examples, found 2"),
    ],
)
def test_what_a_hostile_cluster_sends_is_refused(frame, reason):
    with service_of(1, kept=KeptActivations(MIB), examples=8) as service:
        address = service.open_round(1, [0], 1)[0]
        status, details = call(address, hello(address), frame())
        assert status == grpc.StatusCode.FAILED_PRECONDITION and reason in details
        service.finish_round({})


def test_examples_of_a_step_are_counted_over_its_micro_batches():
    batch, names = batch_of(0, 5), KeptExamples()
    with service_of(1, kept=KeptActivations(MIB), examples=8) as service:
        with pytest.raises(LinkError, match="a step has at most 8 examples, found 10"):
            with DecoderStream.open(service.open_round(1, [0], 2)[0], kept=names) as stream:
                send(stream, step_id(0, 1), batch)
                stream.end_step(1.0)
                weight = target_weight(batch[2])
                stream.begin_step(step_id(0, 2), 2, 2 * weight)
                for i in range(2):
                    stream.recall(i, NAMES[0] + NAMES[1], weight)
                    stream.receive_loss()


def test_a_server_that_keeps_nothing_takes_no_recall():
    with service_of(1) as service:
        address = service.open_round(1, [0], 1)[0]
        status, details = call(address, hello(address), recall_frame("a"))
        assert status == grpc.StatusCode.INVALID_ARGUMENT
        assert "expected a micro_batch, step_end or bye frame, found recall" in details
        service.finish_round({})
        assert_still_serves(service, 2)
