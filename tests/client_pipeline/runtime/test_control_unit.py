"""What a control unit does around its rounds: where its data order begins, what it keeps, and what it tells."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime import control_unit as control_unit_module
from client_pipeline.runtime.cluster_checkpoint import ClusterCheckpoint, read_checkpoint, write_checkpoint
from client_pipeline.runtime.fault_files import keep, note_injected, read_injected, recorded_faults
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.runtime.moved_block import MovedBlock
from client_pipeline.runtime.pacing import Pace, StagePace
from helpers.recovery_cases import LOCAL_STEPS, SPEC, Examples, control_unit, initial, train
from helpers.thread_ray import run_in_threads

ONE = ClusterPlan(delta=(4,), order=(0,), m=3)
PLAIN = replace(SPEC, config={**SPEC.config, "dropout": 0.0})


@pytest.fixture
def units(monkeypatch):
    run_in_threads(monkeypatch)
    made = []

    def make(**more):
        made.append(control_unit(f"unit-{len(made)}", **{"spec": PLAIN, **more}))
        return made[-1]

    yield make
    for unit in made:
        unit.close()


# Before the first round.


def test_a_control_unit_says_what_the_server_must_know_and_loads_its_data_once(units):
    loaded = []
    unit = units(cluster=3, load_data=lambda: loaded.append(1) or Examples())
    found = [unit.prepare() for _ in range(2)][1]
    assert found.pop("pid") > 0
    assert found == {"cluster": 3, "num_examples": 24, "truncated": 0, "num_blocks": 4, "restored": False}
    assert loaded == [1]


class Cut:
    """Nine examples, of which five were too long."""

    truncated = 5

    def __len__(self):
        return 9


def test_data_that_was_cut_is_told(units):
    found = units(load_data=Cut).prepare()
    assert (found["num_examples"], found["truncated"]) == (9, 5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_checkpoints_a_run_goes_on_where_its_data_order_was(units, caplog, accumulation):
    whole = units(gradient_accumulation=accumulation)
    whole.prepare()
    for _ in range(2 * LOCAL_STEPS * accumulation):
        whole.order.next_batch()
    expected = whole.order.next_batch()
    unit = units(resume_round=2, gradient_accumulation=accumulation)
    with caplog.at_level(logging.WARNING):
        assert not unit.prepare()["restored"]
    assert unit.order.next_batch() == expected
    assert "checkpoints are off: the optimizer states start afresh" in caplog.text


RECORD = FaultRecord(kind="device", cluster=0, round=1, recovered=True)


@pytest.mark.parametrize(
    ("changes", "clears", "forgets"),
    [({}, True, True), ({"lost_at": 5.0}, True, False), ({"resume_round": 1}, False, False)],
)
def test_a_new_run_begins_without_files_and_one_that_goes_on_keeps_them(units, tmp_path, changes, clears, forgets):
    folder = tmp_path / "faults"
    states = {f"block.{i}": MovedBlock({"w": torch.ones(1)}) for i in range(4)}
    write_checkpoint(tmp_path / "states", ClusterCheckpoint(1, 18, states))
    keep(folder, 1, [RECORD])
    note_injected(folder, "device", 1)
    unit = units(checkpoints=tmp_path / "states", folder=folder, **changes)
    unit.prepare()
    assert (list((tmp_path / "states").iterdir()) == []) == clears
    assert (read_injected(folder) == [] and recorded_faults(folder, 1) == []) == forgets
    assert unit.restored == (not clears)
    if unit.restored:
        assert unit.order.drawn == 18


def test_a_cluster_that_has_no_checkpoint_begins_anew(units, tmp_path):
    unit = units(checkpoints=tmp_path, resume_round=3)
    assert not unit.prepare()["restored"] and unit.order.drawn == 0


# Rounds.


def pace(uplink_s, stage_s=0.0):
    return Pace([StagePace(*[[stage_s] * 3] * 2, *[[0.0] * 3] * 3)], uplink_s)


@pytest.fixture
def slept(monkeypatch):
    seconds = []
    time = control_unit_module.time
    watched = SimpleNamespace(time=time.time, perf_counter=time.perf_counter, sleep=seconds.append)
    monkeypatch.setattr(control_unit_module, "time", watched)
    return seconds


@pytest.mark.parametrize(("uplink_s", "least", "most"), [(500.0, 400.0, 500.0), (0.0, 0.0, 0.0)])
def test_a_paced_round_lasts_as_long_as_its_upload_from_the_end_of_its_steps(units, slept, uplink_s, least, most):
    _, [result] = train(units(), initial(PLAIN), [1], ONE, pace=pace(uplink_s))
    [seconds] = slept
    assert least <= seconds <= most
    assert result.report["paced_s"] is not None


def test_a_round_that_is_not_paced_waits_for_nothing(units, slept):
    _, [result] = train(units(), initial(PLAIN), [1], ONE)
    assert slept == [] and result.report["paced_s"] is None
    assert result.wall_s >= sum(result.report[part] for part in ("prepare_s", "train_s", "collect_s")) * 0.999


def test_loss_and_weight_of_a_round_are_those_of_all_its_steps(units):
    # Without a step that matters the loss of every step is that of the weights it begins with.
    still = replace(units().setup.optimizer, name="sgd", lr=1e-30, schedule="constant", warmup_steps=0)
    _, [three] = train(units(optimizer=still), initial(PLAIN), [1], ONE)
    losses = []
    for step in range(LOCAL_STEPS):
        unit = units(optimizer=still, local_steps=1)
        unit.prepare()
        unit.order.go_to(6 * step)
        _, [one] = train(unit, initial(PLAIN), [1], ONE)
        losses.append(one.loss)
        assert one.weight == 30
    assert three.weight == 90 and three.steps == LOCAL_STEPS
    assert three.loss == pytest.approx(sum(losses) / LOCAL_STEPS, rel=1e-5)
    assert 0 < three.loss < 2 * math.log(30)


def test_a_checkpoint_has_all_parts_and_the_place_in_the_data(units, tmp_path):
    unit = units(checkpoints=tmp_path, cluster=1)
    _, [result] = train(unit, initial(PLAIN), [1], ONE)
    found = read_checkpoint(tmp_path, 1)
    assert found.states.keys() == {"embedding", "head", *(f"block.{i}" for i in range(4))}
    assert (found.round, found.drawn) == (1, 6 * LOCAL_STEPS)
    for part, prefix in (("embedding", "embedding."), ("block.2", "blocks.2."), ("head", "head.")):
        state = found.states[part]
        assert state.optimizer
        for name, value in state.weights.items():
            assert torch.equal(value, result.weights[prefix + name])


def test_devices_that_became_slow_are_recorded_once_over_two_rounds(units):
    unit = units()
    unburdened = []
    asked, answers = [], [True, True, False, True]
    unit.recovery = SimpleNamespace(
        unburden=lambda slow, known: unburdened.append((dict(slow), set(known))),
        relief_pays=lambda slow, outcome, steps_left: asked.append((dict(slow), steps_left)) or answers.pop(0),
    )
    found = [{}, {1: 8.0}, {2: 5.0}]
    unit.speed = SimpleNamespace(observe=lambda reports: found.pop(0))
    for steps_left in (5, 4, 3):
        unit._look_for_slow_ones(SimpleNamespace(devices={}), steps_left)
    assert unburdened == [({1: 8.0}, set()), ({1: 8.0, 2: 5.0}, {1})]
    assert asked == [({1: 8.0}, 4), ({1: 8.0, 2: 5.0}, 3)]
    unit._slow_before = {4: 9.0}
    # One that is not worth a move is not taken for slow.
    found += [{3: 7.0}, {1: 7.0}]
    for _ in range(2):
        unit._look_for_slow_ones(SimpleNamespace(devices={}), 2)
    assert len(unburdened) == 3 and unburdened[2] == ({1: 7.0, 2: 5.0}, {1, 2, 4})
