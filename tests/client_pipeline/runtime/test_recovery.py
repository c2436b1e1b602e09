"""A device that is lost in the middle of a step costs seconds, and not one bit of the result."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from client_pipeline.partition.families import build_parts
from client_pipeline.runtime import fault_files
from client_pipeline.runtime.control_unit import RoundOrder, RoundResult
from client_pipeline.runtime.decoder_update import HeadTrainer
from client_pipeline.runtime.faults import KILLED, DeviceFault, FailedRound, LostRound
from client_pipeline.runtime.recovery import Recovery
from helpers.decoder_cases import all_at_once
from helpers.recovery_cases import (
    ADAMW,
    LOCAL_STEPS,
    NUM_BLOCKS,
    SPEC,
    THREE,
    assert_equal,
    control_unit,
    faults,
    go_on,
    initial,
    kill,
    once,
    stop,
    train,
    until,
    within,
)
from helpers.shared_actors import shared_but
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

HANG_S = 240.0


@pytest.fixture(scope="module")
def units(local_ray):
    made = []

    def make(**more):
        made.append(control_unit(f"recovery-{len(made)}", **more))
        return made[-1]

    yield make
    for unit in made:
        unit.close()


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
    until(lambda: len(ray.wait(signs, num_returns=len(signs), timeout=0)[0]) == len(signs))


def test_devices_killed_anywhere_in_a_step_change_nothing_and_are_recorded_at_once(
    local_ray, units, undisturbed, tmp_path
):
    """One in each round from the second on, and in the last all at once; each time all three take part at first."""
    expected, results = undisturbed
    unit, recorded = units(folder=tmp_path), []
    weights, [quiet] = within(HANG_S, train, unit, initial(), [1])
    assert_equal(weights, expected[0])
    assert quiet.loss == results[0].loss and faults([quiet]) == []
    kills = {
        2: ("F", 1, [1]),  # in forward
        3: ("F", 3, [2]),  # the last stage
        4: ("G", 2, [0]),  # in backward
        5: ("B", 0, [0]),  # when others may have stepped
        6: ("G", 1, [0, 1, 2]),
    }
    for number, (kind, micro_batch, devices) in kills.items():

        def strike(devices=devices):
            for device in devices:
                kill(unit, device)

        wait_until_back(local_ray, unit)
        struck = once(unit, round_=number, step=2, kind=kind, micro_batch=micro_batch, act=strike)
        if number == 2:
            # What can be read if the control unit is lost later in the round.
            once(
                unit,
                round_=2,
                step=3,
                kind="G",
                micro_batch=1,
                act=lambda: recorded.extend(fault_files.recorded_faults(tmp_path, 2)),
            )
        weights, [result] = within(HANG_S, train, unit, weights, [number])
        assert struck, number
        assert_equal(weights, expected[number - 1])
        assert result.loss == results[number - 1].loss, number
        # Devices that are back have joined the round at its beginning, or between its steps.
        found = [fault for fault in result.report["faults"] if fault["kind"] == "device"]
        assert sorted(fault["device"] for fault in found) == devices, number
        assert all(fault["round"] == number for fault in found), number
        if len(devices) == 1:
            [fault] = found
            # One that had done its work already is missed when the next thing is asked of it.
            assert fault["step"] == 2 if kind != "B" else fault["step"] in (2, 3), number
            assert fault["recovered"] and 0 < fault["seconds"] < HANG_S and fault["bytes"] > 0
            # Two devices have done the work of three.
            assert devices[0] not in [segment.device for segment in unit.pipeline.segments]
        else:
            # They were started again when they were killed: the round used to be lost while they were on their way.
            assert "joined" in [kind for kind, *_ in faults([result])]
        if number == 3:
            # A round that is trained again, or another one, has records of its own.
            assert fault_files.recorded_faults(tmp_path, 2) == []
    [fault] = recorded
    assert (fault["kind"], fault["device"], fault["round"], fault["recovered"]) == ("device", 1, 2, True)
    unit.close()


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


def test_with_one_copy_a_round_a_later_step_is_never_played_from_that_copy(units):
    """It would take the TEBs back by a step and the embedding not: the round is lost, and says what would save it."""
    unit = units(runtime={"snapshots": "round"}, placement=shared_but(0, 1))
    once(unit, round_=1, step=1, kind="G", micro_batch=1, act=lambda: kill(unit, 1))
    weights, [result] = within(HANG_S, train, unit, initial(), [1])
    assert faults([result]) == [("device", 1, 1, 1)] and result.report["faults"][0]["recovered"]
    before = {name: value.clone() for name, value in unit.optimizer.state().items()}
    lost = unit.pipeline.segments[0].device
    struck = once(unit, round_=2, step=2, kind="G", micro_batch=1, act=lambda: kill(unit, lost))
    with pytest.raises(FailedRound, match="snapshots = round keeps no copy of step 1: the round is lost") as error:
        within(HANG_S, train, unit, weights, [2])
    assert struck
    assert [
        (f["kind"], f["device"], f["step"], f["recovered"]) for f in error.value.faults if f["kind"] != "joined"
    ] == [("device", lost, 2, False)]
    # What step 1 had done to the control unit's own part is undone.
    assert_equal(unit.optimizer.state(), before)
    assert within(HANG_S, train, unit, weights, [3])[1][0].steps == LOCAL_STEPS
    unit.close()


def test_a_step_that_kills_its_devices_each_time_loses_the_round(monkeypatch):
    """Devices that are lost are started again at once: without a bound such a step would be played for ever."""
    recovery, played = Recovery(SimpleNamespace(), 0), []
    recovery.plan = THREE
    monkeypatch.setattr(recovery, "_give_up", lambda fault: None)
    monkeypatch.setattr(recovery, "_apply_again", lambda: None)

    def out_of_memory():
        played.append(1)
        raise DeviceFault("device 1 was killed", KILLED, (1,))

    with pytest.raises(LostRound, match="device 1 was killed; devices were lost 10 times in one action"):
        recovery.run(out_of_memory)
    assert len(played) == 10
