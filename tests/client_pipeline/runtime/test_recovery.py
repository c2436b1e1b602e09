"""A device that is lost in the middle of a step costs seconds, and not one bit of the result."""

from dataclasses import replace

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.runtime.control_unit.round_order import RoundOrder, RoundResult
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from helpers.decoder_cases import all_at_once
from helpers.patience import eventually
from helpers.recovery_cases import (
    ADAMW,
    LOCAL_STEPS,
    NUM_BLOCKS,
    SPEC,
    THREE,
    assert_equal,
    control_units,
    faults,
    go_on,
    initial,
    kill,
    once,
    stop,
    train,
    within,
)
from helpers.shared_actors import shared_but
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

HANG_S = 240.0


@pytest.fixture(scope="module")
def units(local_ray):
    with control_units("recovery") as make:
        yield make


@pytest.fixture(scope="module")
def undisturbed(units):
    """Weights after each of six rounds without a fault, and the rounds' results."""
    unit = units(placement=shared_but())
    after_round, results = [initial()], []
    for number in range(1, 7):
        weights, [result] = train(unit, after_round[-1], [number])
        after_round.append(weights)
        results.append(result)
    unit.close()
    assert faults(results) == []
    return after_round[1:], results


def wait_until_back(ray, unit):
    """A process takes seconds to start; the round that comes must find it."""
    signs = [lost.sign for lost in unit.pipeline.pool._lost.values()]
    eventually(lambda: len(ray.wait(signs, num_returns=len(signs), timeout=0)[0]) == len(signs))


def round_behind_the_stream(units, own_processes, disturb):
    """One round of two clusters; returns the decoder's summary and the results."""
    trainer = DecoderTrainer(HeadTrainer(build_parts(SPEC, seed=1).head, ADAMW, unit=NUM_BLOCKS), "step")
    service = DecoderService(DecoderConfig(), trainer, num_clusters=2)
    service.start()
    # The device that may be killed has a process of its own.
    pair = [units(cluster=n, placement=shared_but(*own)) for n, own in enumerate(own_processes)]
    disturb(pair[0])
    weights = {name: value for name, value in initial().items() if not name.startswith("head.")}
    try:
        addresses = service.open_round(1, [0, 1], LOCAL_STEPS)
        orders = [RoundOrder(round=1, weights=weights, plan=THREE, decoder=addresses[n]) for n in (0, 1)]
        results = all_at_once(*(lambda n=n: pair[n].train_round(orders[n]) for n in (0, 1)))
        return service.finish_round(), results
    finally:
        service.stop()
        for unit in pair:
            unit.close()


def test_a_device_killed_behind_the_stream_leaves_the_decoder_and_the_other_cluster_as_they_were(units):
    struck = []

    def disturb(unit):
        struck.append(once(unit, round_=1, step=2, kind="G", micro_batch=1, act=lambda: kill(unit, 1)))

    quiet, expected = round_behind_the_stream(units, [(), ()], lambda unit: None)
    found, results = round_behind_the_stream(units, [(1,), ()], disturb)
    assert all(isinstance(result, RoundResult) for result in results), results
    assert struck[0] and faults(results) == [("device", 1, 1, 2)]
    assert found.clusters == quiet.clusters
    assert_equal(found.head, quiet.head)
    for one, other in zip(results, expected, strict=True):
        assert_equal(one.weights, other.weights)
        # Nothing counts twice: what was sent again is in no count.
        assert one.report["payload_bytes"] == other.report["payload_bytes"]


def test_faults_in_every_round_and_devices_that_come_back_change_nothing(local_ray, units, undisturbed):
    """Each kind of loss once, one round after the other; those who are back take part again."""
    expected, results = undisturbed
    unit, stopped, losses = units(), [], []

    def stop_one():
        stopped.append(unit.pipeline.pool.pids[1][0])
        stop(unit, 1)

    weights, seen = initial(), []
    try:
        for number in range(1, 7):
            if number == 2:  # in forward
                once(unit, round_=2, step=1, kind="F", micro_batch=0, act=lambda: kill(unit, 0))
            elif number == 3:  # two at once, in backward
                once(unit, round_=3, step=3, kind="B", micro_batch=1, act=lambda: [kill(unit, 0), kill(unit, 2)])
            elif number == 4:  # frozen
                once(unit, round_=4, step=2, kind="G", micro_batch=1, act=stop_one)
            elif number == 5:  # while TEBs move: the devices go round, and one is gone
                go_on(stopped[0])
                wait_until_back(local_ray, unit)
                kill(unit, 2)
            plan = THREE if number != 5 else replace(THREE, order=(1, 2, 0), delta=(2, 1, 1))
            if number in (3, 4, 6):
                wait_until_back(local_ray, unit)
            weights, [result] = within(HANG_S, train, unit, weights, [number], plan)
            seen += faults([result])
            losses.append(result.loss)
        assert unit.pipeline.segments == THREE.segments()  # all three are back in the last round
    finally:
        for pid in stopped:
            go_on(pid)
    assert_equal(weights, expected[-1])
    assert losses == [result.loss for result in results]
    lost = [(kind, device, round_) for kind, device, round_, _ in seen if kind != "joined"]
    assert lost[0] == ("device", 0, 2)
    assert sorted(lost[1:3]) == [("device", 0, 3), ("device", 2, 3)]
    assert lost[3] == ("freeze", 1, 4)
    assert lost[4] == ("device", 2, 5)
    assert len(lost) == 5
    joined = [(device, round_) for kind, device, round_, _ in seen if kind == "joined"]
    assert (0, 3) in joined and (1, 5) in joined and (2, 6) in joined
    unit.close()
