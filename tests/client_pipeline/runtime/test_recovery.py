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
    """Weights and losses of two rounds without a fault."""
    unit = units()
    weights, results = train(unit, initial())
    unit.close()
    assert faults(results) == []
    return weights, results


@pytest.mark.parametrize(
    ("kind", "micro_batch", "device"),
    [("F", 1, 1), ("F", 3, 2), ("G", 2, 0), ("B", 0, 0)],
    ids=["in-forward", "the-last-stage", "in-backward", "when-others-may-have-stepped"],
)
def test_a_device_killed_in_a_step_changes_nothing(units, undisturbed, kind, micro_batch, device):
    expected, results = undisturbed
    unit = units()
    struck = once(unit, round_=2, step=2, kind=kind, micro_batch=micro_batch, act=lambda: kill(unit, device))
    weights, disturbed = within(HANG_S, train, unit, initial())
    assert struck
    assert_equal(weights, expected)
    assert [r.loss for r in disturbed] == [r.loss for r in results]
    [(what, who, round_, step)] = faults(disturbed)
    assert (what, who, round_) == ("device", device, 2)
    # One that had done its work already is missed when the next thing is asked of it.
    assert step == 2 if kind != "B" else step in (2, 3)
    [fault] = disturbed[1].report["faults"]
    assert fault["recovered"] and 0 < fault["seconds"] < HANG_S and fault["bytes"] > 0
    # Two devices have done the work of three.
    assert device not in [segment.device for segment in unit.pipeline.segments]
    unit.close()


def test_a_cluster_that_loses_all_its_devices_at_once_waits_for_them_and_loses_nothing(units, undisturbed):
    # Devices that are killed are started again: the round used to be lost while they were on their way.
    expected, results = undisturbed
    unit = units()
    once(unit, round_=2, step=2, kind="G", micro_batch=1, act=lambda: [kill(unit, device) for device in range(3)])
    weights, disturbed = within(HANG_S, train, unit, initial())
    assert_equal(weights, expected)
    assert [r.loss for r in disturbed] == [r.loss for r in results]
    found = faults(disturbed)
    assert sorted(device for kind, device, _, _ in found if kind == "device") == [0, 1, 2]
    assert any(kind == "joined" for kind, *_ in found)
    unit.close()


def test_what_a_control_unit_has_recorded_can_be_read_when_it_is_lost_later_in_the_round(units, tmp_path):
    unit, found = units(folder=tmp_path), []
    once(unit, round_=1, step=1, kind="G", micro_batch=1, act=lambda: kill(unit, 1))
    once(
        unit,
        round_=1,
        step=3,
        kind="G",
        micro_batch=1,
        act=lambda: found.extend(fault_files.recorded_faults(tmp_path, 1)),
    )
    within(HANG_S, train, unit, initial(), [1])
    [fault] = found
    assert (fault["kind"], fault["device"], fault["round"], fault["recovered"]) == ("device", 1, 1, True)
    # A round that is trained again, or another one, has records of its own.
    assert fault_files.recorded_faults(tmp_path, 2) == []
    within(HANG_S, train, unit, initial(), [2])
    assert fault_files.recorded_faults(tmp_path, 1) == []
    unit.close()


def round_behind_the_stream(units, disturb):
    """One round of two clusters; returns the decoder's summary and the results."""
    trainer = DecoderTrainer(HeadTrainer(build_parts(SPEC, seed=1).head, ADAMW, unit=NUM_BLOCKS), "step")
    service = DecoderService(DecoderConfig(), trainer, num_clusters=2)
    service.start()
    pair = [units(cluster=n) for n in (0, 1)]
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

    quiet, expected = round_behind_the_stream(units, lambda unit: None)
    found, results = round_behind_the_stream(units, disturb)
    assert all(isinstance(result, RoundResult) for result in results), results
    assert struck[0] and faults(results) == [("device", 1, 1, 2)]
    assert found.clusters == quiet.clusters
    assert_equal(found.head, quiet.head)
    for one, other in zip(results, expected, strict=True):
        assert_equal(one.weights, other.weights)
        # Nothing counts twice: what was sent again is in no count.
        assert one.report["payload_bytes"] == other.report["payload_bytes"]


def test_faults_in_every_round_and_devices_that_come_back_change_nothing(local_ray, units):
    """Each kind of loss once, one round after the other; those who are back take part again."""
    numbers = range(1, 7)
    quiet = units()
    expected, results = train(quiet, initial(), numbers)
    quiet.close()
    unit, stopped, losses = units(), [], []

    def back():
        # A process takes seconds to start; the round that comes must find it.
        signs = [lost.sign for lost in unit.pipeline.pool._lost.values()]
        until(lambda: len(local_ray.wait(signs, num_returns=len(signs), timeout=0)[0]) == len(signs))

    def stop_one():
        stopped.append(unit.pipeline.pool.pids[1][0])
        stop(unit, 1)

    weights, seen = initial(), []
    try:
        for number in numbers:
            if number == 2:  # in forward
                once(unit, round_=2, step=1, kind="F", micro_batch=0, act=lambda: kill(unit, 0))
            elif number == 3:  # two at once, in backward
                once(unit, round_=3, step=3, kind="B", micro_batch=1, act=lambda: [kill(unit, 0), kill(unit, 2)])
            elif number == 4:  # frozen
                once(unit, round_=4, step=2, kind="G", micro_batch=1, act=stop_one)
            elif number == 5:  # while TEBs move: the devices go round, and one is gone
                go_on(stopped[0])
                back()
                kill(unit, 2)
            plan = THREE if number != 5 else replace(THREE, order=(1, 2, 0), delta=(2, 1, 1))
            if number in (3, 4, 6):
                back()
            weights, [result] = within(HANG_S, train, unit, weights, [number], plan)
            seen += faults([result])
            losses.append(result.loss)
        assert unit.pipeline.segments == THREE.segments()  # all three are back in the last round
    finally:
        for pid in stopped:
            go_on(pid)
    assert_equal(weights, expected)
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
    unit = units(runtime={"snapshots": "round"})
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
