"""The control unit's actor: found by name from any process, given up when it freezes, replaced by a newer run's."""

import contextlib
import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.actors import ControlUnitError, start_control_unit, train_round
from client_pipeline.runtime.control_unit.control_unit import ControlUnit
from helpers.actor_cases import order, setup_of
from helpers.patience import eventually
from helpers.shared_actors import shared_but
from helpers.tiny_models import CLASSIC, tiny_batch


def names(ray):
    return {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)}


def test_a_control_unit_keeps_its_place_in_the_data_between_calls_and_yields_to_a_newer_run(local_ray, end_actors):
    assert start_control_unit(setup_of("actors-1"))["num_examples"] == 7
    assert start_control_unit(setup_of("actors-1", cluster=1))["cluster"] == 1
    results = [train_round("actors-1", 0, order(n), 240) for n in (1, 2)]
    assert [result.steps for result in results] == [1, 1]
    assert results[0].report["devices"].keys() == {"0", "1"}

    start_control_unit(setup_of("actors-2"))
    left = names(local_ray)
    assert "collapipe/actors-2/cluster-0" in left
    assert not any(name.startswith("collapipe/actors-1/cluster-0") for name in left)
    assert "collapipe/actors-1/cluster-1" in left
    with pytest.raises(ControlUnitError, match="collapipe/actors-1/cluster-0: no control unit is running"):
        train_round("actors-1", 0, order(3), 240)


def test_a_control_unit_in_a_round_refuses_a_second_run(monkeypatch, local_ray, end_actors, tmp_path):
    """Two runs at once ended each other's control units, again and again."""
    monkeypatch.setattr("client_pipeline.runtime.control_unit.actors.YIELD_S", 2.0, raising=False)
    batch, go_on = tiny_batch(CLASSIC, size=7), tmp_path / "go-on"

    class SlowBatch:
        def __len__(self):
            return len(batch["input_ids"])

        def collate(self, indices, seed=0):
            (tmp_path / "in-a-round").touch()
            while not go_on.exists():
                time.sleep(0.05)
            return batch

    start_control_unit(dataclasses.replace(setup_of("actors-6", SlowBatch), placement=shared_but()))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train_round, "actors-6", 0, order(), 240)
        try:
            eventually((tmp_path / "in-a-round").exists)
            with pytest.raises(ValueError, match="cluster 0: its control unit has been in a round of another run, "):
                start_control_unit(setup_of("actors-7"))
        finally:
            go_on.touch()
        assert first.result().steps == 1
    # Between rounds it gives way: the server apps of two runs exclude each other.
    assert start_control_unit(setup_of("actors-7"))["num_examples"] == 7
    assert not any(name.startswith("collapipe/actors-6/cluster-0") for name in names(local_ray))


def test_data_that_does_not_fit_is_the_users_error(local_ray, end_actors):
    def load():
        raise ValueError("train.en: line 3 has no label")

    with pytest.raises(ValueError, match=r"train.en: line 3 has no label"):
        start_control_unit(setup_of("actors-3", load))


def test_a_control_unit_is_waited_for_while_it_starts_and_given_up_in_bounded_time_when_it_freezes(
    monkeypatch, local_ray, end_actors
):
    with monkeypatch.context() as patch:
        # On a busy machine a resumed run once gave up control units in the middle of their imports.
        patch.setattr("client_pipeline.runtime.control_unit.actors.SILENT_S", 5.0)
        patch.setattr("client_pipeline.runtime.control_unit.actors._ASK_S", 0.05)
        described = start_control_unit(setup_of("actors-4"))
    assert described["num_examples"] == 7
    os.kill(described["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(ControlUnitError, match="cluster-0: the control unit has given no sign of life for 2 s"):
            train_round("actors-4", 0, order(), 2.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(described["pid"], signal.SIGCONT)


def test_a_control_unit_outside_an_actor_ends_no_process(monkeypatch, local_ray):
    ended = []
    monkeypatch.setattr("client_pipeline.runtime.devices.device.os._exit", ended.append)
    setup = dataclasses.replace(setup_of("actors-4"), runtime=RuntimeConfig(timeout=240, actor_idle=0.05))
    ControlUnit(setup)
    time.sleep(0.5)
    assert not ended
