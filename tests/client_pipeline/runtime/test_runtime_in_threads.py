"""A cluster's whole runtime, but for Ray: its actors are threads here, so that a test takes less than a second."""

import os
import time
from dataclasses import replace

import pytest
import torch

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.transport.faults import FailedRound
from helpers.recovery_cases import (
    ADAMW,
    LOCAL_STEPS,
    NUM_BLOCKS,
    SPEC,
    THREE,
    assert_equal,
    control_unit,
    control_units,
    decoder_refuses,
    faults,
    initial as initial_of,
    once,
    train as train_weights,
    within,
)
from helpers.thread_ray import run_in_threads

PLAIN = replace(SPEC, config={**SPEC.config, "dropout": 0.0})
HANG_S = 60.0
HERE = os.getpid()
EVEN = ClusterPlan(delta=(2, 2, 0), order=(0, 1), m=3, schedule="1f1b")


@pytest.fixture
def threads(monkeypatch):
    return run_in_threads(monkeypatch)


@pytest.fixture
def units(threads):
    with control_units("threads", spec=PLAIN) as make:
        yield make


@pytest.fixture(scope="module")
def undisturbed():
    """Train two rounds whose devices nobody disturbs; return the weights, and the rounds' results."""
    with pytest.MonkeyPatch.context() as patch:
        run_in_threads(patch)
        unit = control_unit("undisturbed", spec=PLAIN)
        try:
            return train(unit)
        finally:
            unit.close()


@pytest.fixture(scope="module")
def apart():
    """Train a cluster with dropout whose devices each have a process; return its weights by codec."""
    return {codec: trained_in(lambda name: None, codec) for codec in ("none", "int8")}


def trained_in(process_of, codec):
    with pytest.MonkeyPatch.context() as patch:
        run_in_threads(patch, process_of)
        # With dropout: devices of one process draw from the same generator.
        unit = control_unit("shared", compression=CompressionConfig(activations=codec))
        try:
            return within(HANG_S, train_weights, unit, initial_of(SPEC), (1, 2), THREE)
        finally:
            unit.close()


def actor(unit, number):
    return unit.pipeline.pool[number]


def initial():
    return initial_of(PLAIN)


def train(unit, rounds=(1, 2), plan=THREE, weights=None):
    return within(HANG_S, train_weights, unit, weights or initial(), rounds, plan)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("processes", [(HERE, HERE, HERE), (1, 1, 1), (1, 2, 1), (HERE, 2, 2), (HERE, HERE, 2)])
def test_devices_that_share_a_process_train_the_same_bit_for_bit(processes, codec, apart):
    """Tensors pass in memory between some, by gloo between others; the control unit is in ``HERE``."""
    expected, alone = apart[codec]
    found, shared = trained_in(lambda name: processes[int(name[-1])], codec)
    assert_equal(found, expected)
    assert [result.loss for result in shared] == [result.loss for result in alone]
    assert [result.report["link_bytes"] for result in shared] == [result.report["link_bytes"] for result in alone]


@pytest.mark.parametrize("processes", [(HERE, HERE, HERE), (1, 1, 2), (HERE, 2, 2)])
def test_all_devices_of_a_process_may_end_with_it(processes, monkeypatch, undisturbed):
    threads = run_in_threads(monkeypatch, lambda name: processes[int(name[-1])])
    expected, _ = undisturbed
    unit = control_unit("ends", spec=PLAIN)
    shared = [device for device in range(3) if processes[device] == processes[1]]

    def end():
        actors = [threads.actors[f"{unit.setup.actor_name}/device-{device}"] for device in shared]
        for each in actors:
            each.answer_no_more()
        for each in actors:
            each.close_connections()

    once(unit, round_=2, step=2, kind="G", micro_batch=1, act=end)
    weights, results = train(unit)
    assert_equal(weights, expected)
    assert {who for kind, who, *_ in faults(results) if kind == "device"} == set(shared)
    unit.close()


@pytest.mark.parametrize(("m", "fused", "computed"), [(4, 2, 2), (6, 4, 2), (3, 9, 1)])
def test_fused_micro_batches_are_those_of_a_smaller_m(m, fused, computed, units):
    plain, _ = train(unit := units(), plan=replace(THREE, m=computed))
    weights, results = train(fusing := units(runtime={"fused_micro_batches": fused}), plan=replace(THREE, m=m))
    assert_equal(weights, plain)
    # What is planned and accounted for stays that of m.
    assert all(result.report["plan"]["m"] == m for result in results)
    assert unit.pipeline.num_micro_batches == fusing.pipeline.num_micro_batches == computed
    _, apart = train(units(), plan=replace(THREE, m=m))
    assert [result.loss for result in results] == pytest.approx([result.loss for result in apart], rel=1e-5)


def test_every_plan_trains_the_same_as_one_device(units):
    alone, _ = train(units(), plan=ClusterPlan(delta=(4,), order=(0,), m=3))
    others = (("gpipe", (1, 2, 1), (2, 0, 1)), ("zb-h1", (1, 2, 1), (0, 2, 1)))
    for plan in (EVEN, *(replace(EVEN, delta=d, order=o, schedule=name) for name, d, o in others)):
        unit = units()
        weights, results = train(unit, plan=plan)
        assert weights.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert faults(results) == []
        assert [result.weight for result in results] == [LOCAL_STEPS * 6 * 5] * 2
        assert results[0].steps == LOCAL_STEPS and results[1].loss < results[0].loss


@pytest.mark.parametrize(("kind", "at", "number"), [("F", 1, 1), ("G", 2, 0), ("B", 0, 2)])
def test_a_device_that_ends_in_a_step_changes_nothing(units, undisturbed, kind, at, number):
    expected, quiet = undisturbed
    unit = units()
    act = actor_ends(unit, number)
    struck = once(unit, round_=2, step=2, kind=kind, micro_batch=at, act=act)
    weights, results = train(unit)
    assert struck
    assert_equal(weights, expected)
    assert [r.loss for r in results] == [r.loss for r in quiet]
    [(what, who, round_, step)] = faults(results)
    assert (what, who, round_) == ("device", number, 2) and step in (2, 3)
    [fault] = results[1].report["faults"]
    assert fault["recovered"] and fault["seconds"] > 0 and fault["bytes"] > 0
    # It was started again at once, and takes part from the next round on; on a busy machine it may be back before the
    # others have been planned for.
    was_back = number in [segment.device for segment in unit.pipeline.segments]
    _, [later] = train(unit, [3], weights=weights)
    assert [f["kind"] for f in later.report["faults"]] == ([] if was_back else ["joined"])
    assert unit.pipeline.segments == THREE.segments()


def test_a_device_that_ends_after_the_last_step_costs_nothing_and_is_recorded(units, undisturbed):
    expected, _ = undisturbed
    unit = units()
    memory, times = unit.pipeline.memory, []

    def asked():
        times.append(1)
        if len(times) == 1:
            actor(unit, 1).end_process()
        return memory()

    unit.pipeline.memory = asked
    weights, results = train(unit)
    assert_equal(weights, expected)
    [fault] = results[0].report["faults"]
    assert (fault["kind"], fault["device"], fault["step"], fault["recovered"]) == ("device", 1, LOCAL_STEPS, True)


def actor_ends(unit, *numbers):
    return lambda: [actor(unit, number).end_process() for number in numbers]


@pytest.mark.slow
def test_a_device_that_stands_still_is_found_and_given_up(units, undisturbed):
    expected, _ = undisturbed
    unit = units()
    stopped = []

    def stop():
        stopped.append(actor(unit, 1))
        stopped[0].stop_process()

    once(unit, round_=1, step=2, kind="G", micro_batch=1, act=stop)
    weights, results = train(unit, [1])
    # It ends the call that it is in: the next step's is the first that it does not answer.
    assert faults(results) == [("freeze", 1, 1, 3)]
    stopped[0].continue_process()
    weights, [later] = train(unit, [2], weights=weights)
    assert_equal(weights, expected)
    assert faults([later]) in ([], [("joined", 1, 2, 0)])


def test_all_devices_may_end_at_once(units, undisturbed):
    expected, _ = undisturbed
    unit = units()
    once(unit, round_=2, step=1, kind="G", micro_batch=1, act=actor_ends(unit, 0, 1, 2))
    weights, results = train(unit)
    assert_equal(weights, expected)
    assert sorted(who for kind, who, *_ in faults(results) if kind == "device") == [0, 1, 2]


def test_a_device_that_is_back_and_not_needed_disturbs_nobody(units, undisturbed):
    """Those who went on without it once were asked what they hold, left their group for that, and joined no other."""
    unit = units()
    once(unit, round_=1, step=2, kind="G", micro_batch=1, act=actor_ends(unit, 1))
    weights, _ = train(unit, [1])
    two = ClusterPlan(delta=(2, 0, 2), order=tuple(unit.recovery.plan.order), m=4)
    assert [segment.device for segment in unit.pipeline.segments] == two.devices
    time.sleep(0.2)  # as the server takes between two rounds: until then it has started
    found, [result] = train(unit, [2], plan=two, weights=weights)
    assert [f["kind"] for f in result.report["faults"]] == ["joined"]
    assert_equal(found, undisturbed[0])


@pytest.mark.parametrize("step", [1, 2])
def test_with_one_copy_a_round_only_the_first_step_can_be_played_again(units, undisturbed, step):
    expected, _ = undisturbed
    unit = units(runtime={"snapshots": "round"})
    weights, _ = train(unit, [1])
    before = {name: value.clone() for name, value in unit.optimizer.state().items()}
    once(unit, round_=2, step=step, kind="G", micro_batch=1, act=actor_ends(unit, 1))
    if step == 1:
        assert_equal(train(unit, [2], weights=weights)[0], expected)
        assert unit.pipeline.placement.snapshots.taken == 2
        return
    with pytest.raises(FailedRound, match="snapshots = round keeps no copy of step 1: the round is lost") as error:
        train(unit, [2], weights=weights)
    assert [(f["kind"], f["device"], f["recovered"]) for f in error.value.faults] == [("device", 1, False)]
    assert_equal(unit.optimizer.state(), before)
    assert train(unit, [3], weights=weights)[1][0].steps == LOCAL_STEPS


def test_a_device_that_fails_by_itself_is_named_and_the_next_round_goes_on(units):
    unit = units()
    weights, _ = train(unit, [1])
    stage = actor(unit, 1)._instance.stage
    forward, stage.forward = stage.forward, None
    with pytest.raises(FailedRound, match="device 1: it failed: 'NoneType' object is not callable") as error:
        train(unit, [2], weights=weights)
    assert [(f["kind"], f["recovered"], f["step"]) for f in error.value.faults] == [("cluster", False, 1)]
    stage.forward = forward
    assert train(unit, [3], weights=weights)[1][0].steps == LOCAL_STEPS


def test_gradients_that_are_not_finite_fail_the_round_and_no_optimizer_takes_them(units):
    unit = units()
    broken = {
        name: value * float("nan") if name.startswith("blocks.2.") else value for name, value in initial().items()
    }
    with pytest.raises(FailedRound, match="holds? NaN or Inf") as error:
        train(unit, [1], weights=broken)
    assert [f["kind"] for f in error.value.faults] == ["nan"]
    unit.order.go_to(0)
    assert_equal(train(unit, [1])[0], train(units(), [1])[0])


def test_clipping_scales_all_parts_by_the_norm_of_the_whole(units):
    clipped = replace(ADAMW, name="sgd", lr=1.0, clip_norm=0.05, schedule="constant", warmup_steps=0, total_steps=0)
    one = ClusterPlan(delta=(4,), order=(0,), m=3)
    expected, _ = train(units(optimizer=clipped, local_steps=1), [1], plan=one)
    found, _ = train(units(optimizer=clipped, local_steps=1), [1], plan=EVEN)
    moved = sum(float((found[name] - start).square().sum()) for name, start in initial().items()) ** 0.5
    assert moved == pytest.approx(0.05, rel=1e-3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_batches_that_accumulate_are_one_step_of_the_large_batch(units):
    sgd = replace(ADAMW, name="sgd", lr=0.5, schedule="constant", warmup_steps=0, total_steps=0)
    large, [whole] = train(units(optimizer=sgd, local_steps=1, batch_size=12), [1], plan=EVEN)
    small, [parts] = train(units(optimizer=sgd, local_steps=1, gradient_accumulation=2), [1], plan=EVEN)
    assert whole.weight == parts.weight == 60
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert parts.report["link_bytes"] == whole.report["link_bytes"]


def test_a_report_counts_bytes_moves_and_copies(units):
    unit = units()
    weights, [first] = train(unit, [1], plan=EVEN)
    report = first.report
    # Forward and backward over one link: 3 steps of 6 examples, 5 positions, width 16, 4 bytes.
    assert report["link_bytes"] == 2 * 3 * 6 * 5 * 16 * 4
    three = ClusterPlan(delta=(2, 1, 1), order=(0, 1, 2), m=3)
    one = ClusterPlan(delta=(4,), order=(0,), m=3)
    for plan, links in ((three, 2), (one, 0)):
        _, [other] = train(units(), [1], plan=plan)
        assert other.report["link_bytes"] == links * report["link_bytes"]
    assert {d: entry["blocks"] for d, entry in report["devices"].items()} == {"0": 2, "1": 2}
    assert all(entry["busy_s"] > 0 and entry["peak_bytes"] > 0 for entry in report["devices"].values())
    assert (report["moved_blocks"], report["moved_bytes"]) == (0, 0)
    teb = sum(v.nbytes for n, v in initial().items() if n.startswith("blocks.0."))
    count = len([n for n in initial() if n.startswith("blocks.0.")])
    # Weights and two moments of each, and a counter of steps.
    copy = NUM_BLOCKS * (3 * teb + 4 * count)
    assert report["snapshots"]["taken"] == LOCAL_STEPS and report["snapshots"]["bytes"] == LOCAL_STEPS * copy
    assert report["payload_bytes"]["update"] == sum(v.nbytes for v in first.weights.values())
    assert report["num_examples"] == 24 and report["cluster"] == 0 and report["paced_s"] is None
    kinds = [(kind, stage, i) for kind, stage, i, *_ in report["timeline"]]
    assert sorted(kinds) == sorted((kind, stage, i) for kind in "FB" for stage in (0, 1) for i in range(3))
    assert min(start for *_, start, _ in report["timeline"]) == 0.0
    assert all(start <= end for *_, start, end in report["timeline"])
    for part in ("prepare_s", "train_s", "collect_s"):
        assert report[part] > 0
    _, [second] = train(unit, [2], plan=replace(EVEN, delta=(1, 3, 0)), weights=weights)
    assert (second.report["moved_blocks"], second.report["moved_bytes"]) == (1, 3 * teb + 4 * count)


def test_a_control_unit_goes_on_from_its_checkpoint(units, tmp_path):
    expected, quiet = train(units(), (1, 2, 3))
    first = units(checkpoints=tmp_path)
    weights, _ = train(first, (1, 2))
    again = units(checkpoints=tmp_path, resume_round=2)
    again.prepare()
    assert again.restored and again.prepare()["num_examples"] == 24
    found, [result] = train(again, [3], weights=weights)
    assert_equal(found, expected)
    assert result.loss == quiet[2].loss
    assert (tmp_path / "round-000003.safetensors").is_file()


def test_a_device_that_does_not_start_is_named(units, threads):
    threads.refuses.add("collapipe/threads-0/cluster-0/device-1")
    unit = units(runtime={"timeout": 2.0})
    weights, [result] = train(unit, [1])
    assert [(f["kind"], f["device"]) for f in result.report["faults"]] == [("device", 1)]
    assert "did not start within 2 s" in result.report["faults"][0]["reason"]
    assert_equal(weights, train(units(), [1])[0])


def test_a_link_that_fails_ends_the_round_and_not_the_cluster(units):
    unit = units()
    with decoder_refuses(unit), pytest.raises(FailedRound, match="the decoder said no"):
        train(unit, [1])
    expected = units()
    expected.prepare()
    expected.order.go_to(unit.order.drawn)
    assert_equal(train(unit, [1])[0], train(expected, [1])[0])


def test_after_a_doubt_the_same_devices_meet_anew(units):
    """They leave their group when they say what they hold: a ring that is taken for joined would wait for ever."""
    expected, _ = train(units(), (1, 2))
    unit = units(runtime={"timeout": 5.0})
    weights, _ = train(unit, [1])
    unit.pipeline.placement.doubt()
    found, [result] = train(unit, [2], weights=weights)
    assert result.report["faults"] == []
    assert_equal(found, expected)


def test_devices_that_were_disconnected_meet_in_another_group(units):
    unit = units()
    weights, _ = train(unit, [1])
    before = unit.pipeline.group.generation
    train(unit, [2], weights=weights)
    assert unit.pipeline.group.generation == before
    unit.pipeline.group.leave()
    _, [result] = train(unit, [3], weights=weights)
    assert unit.pipeline.group.generation > before and result.report["faults"] == []
