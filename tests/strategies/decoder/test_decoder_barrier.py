"""Closed steps alone reach the decoder: absences, streams that come again and again, hostile clusters."""

import threading
import time
from dataclasses import replace
from functools import partial

import grpc
import pytest
import torch

from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.frames import decode, encode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.runtime.stage.decoder_update import Contribution
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.decoder_cases import (
    all_at_once,
    batch_of,
    first_frame,
    head_trainer,
    service_of,
    train_round,
    trainer_of,
    whole_batch,
)
from helpers.patience import eventually
from helpers.raw_streams import call, hello
from strategies.decoder.member import MOST_BEGINNINGS, Refusal
from strategies.decoder.reception import STREAMS_OF_A_CLUSTER
from strategies.decoder.round import Seat

ADAM = OptimizerConfig(name="adamw", lr=0.01)


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_absence_counts_until_the_cluster_is_back_and_no_longer(monkeypatch, comes_back):
    """Cut, come back, stay silent for longer than an absence may take: still in. Only cut: out."""
    clock, offset_s = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock() + offset_s[0])
    monkeypatch.setattr("strategies.decoder.round._LOOK_S", 0.02)
    trainer = trainer_of(step_s=200_000.0)
    trainer.open_round(1, [0, 1], 1)
    here, absent = (trainer.join(1, cluster) for cluster in (0, 1))
    absent.away()
    seat = trainer.rejoin(1, 1, 1) if comes_back else absent
    here.micro_batch(whole_batch(0))
    quick = threading.Thread(target=here.close_step, args=(1, 1.0), daemon=True)
    quick.start()
    offset_s[0] = 3600.0
    quick.join(0.5 if comes_back else 20)
    assert quick.is_alive() is comes_back
    if comes_back:
        seat.micro_batch(whole_batch(1))
        seat.close_step(1, 1.0)
        quick.join(120)
        assert not quick.is_alive()
    clusters = trainer.finish_round().clusters
    assert [clusters[n].steps for n in (0, 1)] == [1, int(comes_back)]
    assert ("did not come back" in clusters[1].departure) is not comes_back


def test_a_step_is_taken_once_though_its_cluster_comes_back_while_it_is_taken(monkeypatch):
    """In mode ``round`` the stream that replaced the closing one took the step a second time, without a gradient."""
    trainer = trainer_of("round", optimizer=ADAM)
    trainer.open_round(1, [0], 2)
    seat = trainer.join(1, 0)
    seat.micro_batch(whole_batch(0))
    take, entered, go_on = Seat._take, threading.Event(), threading.Event()

    def late(*arguments):
        if not entered.is_set():
            entered.set()
            assert go_on.wait(120)
        take(*arguments)

    monkeypatch.setattr(Seat, "_take", late)

    def come_back():
        assert entered.wait(120)
        newer = trainer.rejoin(1, 0, 1)
        assert newer.closed and newer.step == 1
        threading.Timer(0.3, go_on.set).start()
        newer.await_step(newer.step)

    assert all_at_once(lambda: seat.close_step(1, 1.0), come_back) == [None, None]
    head = head_trainer(ADAM)
    batch = whole_batch(0)
    head.gradient(batch.step, 0, batch.hidden_BTD, batch.mask_BT, batch.targets, batch.total_weight)
    head.apply([Contribution(cluster=0, weight=batch.total_weight)], 1)
    found = trainer.finish_round({0: 1.0})
    assert found.clusters[0].steps == 1
    for name, parameter in head.parameters.items():
        torch.testing.assert_close(found.head[name], parameter.detach(), atol=1e-7, rtol=1e-6)


def test_a_cluster_that_opens_its_stream_again_and_again_takes_no_others_place():
    """Each attempt waits for the decoder to have computed; they took all threads."""
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        with grpc.insecure_channel(addresses[1].target) as channel:
            exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            welcome = decode(next(exchange(iter([hello(addresses[1])])))).header
            with service.trainer.copies.lock:
                again = hello(addresses[1], token=welcome["resume"])
                attempts = [exchange(iter([again]), timeout=120) for _ in range(20)]
                eventually(lambda: sum(not one.is_active() for one in attempts) >= len(attempts) - STREAMS_OF_A_CLUSTER)
                (stream,) = all_at_once(lambda: DecoderStream.open(replace(addresses[0], join_timeout_s=2.0)))
                assert isinstance(stream, DecoderStream), stream
                stream.abort()
            for one in attempts:
                one.cancel()


def test_streams_that_are_opened_again_without_end_are_slowed_down():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        token, codes = address.token, []
        with grpc.insecure_channel(address.target) as channel:
            exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            for _ in range(60):
                one = exchange(iter([hello(address, token=token)]), timeout=120)
                try:
                    token = decode(next(one)).header["resume"]
                    list(one)
                except grpc.RpcError as error:
                    codes.append(error.code())
        assert len(codes) >= 15 and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert service.finish_round().clusters[0].steps == 0


def test_a_step_that_is_begun_again_without_end_is_refused():
    """Each attempt costs the decoder a micro-batch, and those who wait for it nothing but time."""
    trainer = trainer_of("round")
    trainer.open_round(1, [0], 2)
    seat = trainer.join(1, 0)
    for attempt in range(MOST_BEGINNINGS):
        seat.micro_batch(replace(whole_batch(0), attempt=attempt))
    with pytest.raises(Refusal, match="step 1 was begun more than 64 times"):
        seat.micro_batch(replace(whole_batch(0), attempt=10**9))


END = encode({"kind": "step_end", "round": 1, "step": 1, "scale": 1.0})
SECOND = first_frame(micro_batch=1, total_weight=None)
OTHER = first_frame(micro_batch=1, total_weight=None, hidden=torch.full((3, 5, 8), torch.nan))
AGAIN = encode({**decode(first_frame()).header, "attempt": 1}, decode(first_frame(hidden=torch.ones(3, 5, 8))).tensors)
HOSTILE = {
    "activations that are not finite": [first_frame(), OTHER],
    "an end that comes too early": [first_frame(), END],
    "a clipping factor above 1": [
        first_frame(),
        SECOND,
        encode({"kind": "step_end", "round": 1, "step": 1, "scale": 1.5}),
    ],
    "another weight than announced": [first_frame(total_weight=1000.0), SECOND, END],
    "a whole step that is never closed": [first_frame(), SECOND],
    "a step begun again, with other contents": [first_frame(), SECOND, AGAIN, b"junk"],
    "a micro-batch again, with other contents": [first_frame(), first_frame(hidden=torch.ones(3, 5, 8))],
    "a frame of the step after": [first_frame(), first_frame(step=2)],
    "a goodbye in the middle": [first_frame(), encode({"kind": "bye"})],
    "it leaves": [first_frame(), SECOND, encode({"kind": "leave", "reason": "\n"})],
}


def rounds(sync, hostile=None):
    """Two rounds of two honest clusters; the third is not there, or is hostile in the first of them."""
    with service_of(num_clusters=3, sync=sync, optimizer=ADAM) as service:
        gradients = []
        for round_ in (1, 2):
            clusters = [0, 1, 2] if hostile and round_ == 1 else [0, 1]
            addresses = service.open_round(round_, clusters, 2)
            if 2 in clusters:
                call(addresses[2], hello(addresses[2]), *hostile)
                if service.trainer.current.members[2].departure is None:
                    call(addresses[2], encode(leave(addresses[2])))
            batches = [[batch_of(n, 3, seed=10 * round_ + step) for step in (1, 2)] for n in (0, 1)]
            results = all_at_once(*(partial(train_round, addresses[n], batches[n]) for n in (0, 1)))
            assert all(isinstance(result, list) for result in results), results
            gradients += [answer.tensor for result in results for step in result for answer in step]
            summary = service.finish_round()
            assert 2 not in clusters or (summary.clusters[2].steps, summary.clusters[2].weight) == (0, 0.0)
        return summary.head, service.trainer.state(), gradients


def leave(address):
    place = {"token": address.token, "round": address.round, "cluster": address.cluster}
    return {"kind": "leave", "reason": "gone", **place}


@pytest.fixture(scope="module")
def honest():
    return {sync: rounds(sync) for sync in ("step", "round")}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("sync", ["step", "round"])
def test_a_refused_stream_leaves_the_decoder_bit_for_bit_as_in_its_absence(honest, sync, case):
    head, state, gradients = honest[sync]
    found_head, found_state, found_gradients = rounds(sync, HOSTILE[case])
    assert found_head.keys() == head.keys() and found_state.keys() == state.keys()
    assert all(torch.equal(found_head[name], value) for name, value in head.items())
    assert all(torch.equal(found_state[name], value) for name, value in state.items())
    assert all(torch.equal(found, one) for found, one in zip(found_gradients, gradients, strict=True))


def test_a_hostile_cluster_keeps_no_step_that_it_had_closed_from_counting():
    """Steps that it closed before the refusal stay, with their weight; nothing after it does."""
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 2)[0]
        code, _ = call(address, hello(address), first_frame(), SECOND, END, END)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        summary = service.finish_round().clusters[0]
        assert (summary.steps, "expected the end of step 2" in summary.departure) == (1, True)
