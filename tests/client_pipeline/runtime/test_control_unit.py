"""A control unit around its rounds: the start of its data order, its checkpoints and its reports."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit import control_unit as control_unit_module
from client_pipeline.runtime.control_unit.cluster_checkpoint import ClusterCheckpoint, read_checkpoint, write_checkpoint
from client_pipeline.runtime.control_unit.fault_files import keep, note_injected, read_injected, recorded_faults
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.transport.faults import FaultRecord
from client_pipeline.timetable.pacing import Pace, StagePace
from helpers.recovery_cases import LOCAL_STEPS, SPEC, Examples, control_units, initial, train
from helpers.thread_ray import run_in_threads

ONE = ClusterPlan(delta=(4,), order=(0,), m=3)
PLAIN = replace(SPEC, config={**SPEC.config, "dropout": 0.0})


@pytest.fixture
def units(monkeypatch):
    run_in_threads(monkeypatch)
    with control_units("unit", spec=PLAIN) as make:
        yield make


# Before the first round.


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


@pytest.mark.parametrize("local_steps", [1, 3])
def test_devices_without_a_teb_are_asked_once_in_a_round_and_with_its_first_step(units, local_steps):
    unit = units(local_steps=local_steps)
    asked, ask = [], unit.spare_devices.ask
    unit.spare_devices.ask = lambda plan, mask: (asked.append((unit.faults.round, unit.order.drawn)), ask(plan, mask))
    train(unit, initial(PLAIN), [1, 2], ONE)
    assert asked == [(1, 6), (2, 6 * (local_steps + 1))]


class OneWord(Examples):
    """Sentences of one word each."""

    def collate(self, indices, seed=0):
        return {name: value[:, :1] for name, value in super().collate(indices, seed).items()}


def test_the_loss_of_a_single_target_is_its_own(units):
    _, [result] = train(units(load_data=OneWord, batch_size=1, local_steps=1), initial(PLAIN), [1], replace(ONE, m=1))
    assert result.weight == 1
    # One of 30 words, before anything is learned.
    assert result.loss == pytest.approx(math.log(30), rel=0.4)


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


def test_a_control_unit_that_goes_on_has_all_that_it_had(units, tmp_path):
    """An update that nobody has confirmed yet waits beside the residual: both come back, with its round."""
    settings = {"checkpoints": tmp_path, "compression": CompressionConfig(update="top-k", density=0.1)}
    unit = units(**settings)
    for number in (1, 2):
        train(unit, initial(PLAIN), [number], ONE, counted=1)
    again = units(**settings, resume_round=2)
    assert again.prepare()["restored"] and again.order.drawn == unit.order.drawn > 0
    for found, expected in (
        (again.feedback.residual, unit.feedback.residual),
        (again.feedback.pending, unit.feedback.pending),
        (again.optimizer.state(), unit.optimizer.state()),
        (again._own_head.optimizer.state(), unit._own_head.optimizer.state()),
    ):
        assert expected and found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert again.feedback.pending_round == unit.feedback.pending_round == 2
    states = read_checkpoint(tmp_path, 2).states
    places, copies = again.pipeline.placement.snapshots.sources([0, 1, 2, 3])
    for index, (_, copy) in enumerate(places):
        kept, expected = MovedBlock.from_arrays(copies[copy][index]), states[f"block.{index}"]
        assert kept.weights.keys() == expected.weights.keys() and kept.optimizer.keys() == expected.optimizer.keys()
        for found, value in ((kept.weights, expected.weights), (kept.optimizer, expected.optimizer)):
            assert value and all(torch.equal(found[name], tensor) for name, tensor in value.items())
