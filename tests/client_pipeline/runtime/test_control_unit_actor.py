"""The control unit to those who have no torch: arrays in, arrays out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from client_pipeline.runtime.control_unit.control_unit_actor import ControlUnitActor
from client_pipeline.runtime.control_unit.round_order import RoundResult
from helpers.actor_cases import order, setup_of


class Doubler:
    """Stands for a control unit: its round writes over the weights that it is given."""

    def train_round(self, order):
        assert all(isinstance(weight, torch.Tensor) for weight in order.weights.values())
        weights = {name: weight.mul_(2) for name, weight in order.weights.items()}
        return RoundResult(weights=weights, weight=1, loss=0.0, steps=1, wall_s=0.0, report={})


@pytest.fixture
def actor(monkeypatch):
    made = ControlUnitActor(setup_of("arrays"))
    monkeypatch.setattr(made, "_made", Doubler)
    return made


def test_weights_come_and_go_as_arrays_and_what_may_only_be_read_is_copied(actor):
    shared = np.arange(3, dtype=np.float32)
    shared.setflags(write=False)
    writable, tensor = np.ones(2, dtype=np.float32), torch.full((1,), 3.0)
    round_order = replace(order(), weights={"shared": shared, "own": writable, "tensor": tensor})
    result = actor.train_round(round_order)
    assert {name: weight.tolist() for name, weight in result.weights.items()} == {
        "shared": [0.0, 2.0, 4.0],
        "own": [2.0, 2.0],
        "tensor": [6.0],
    }
    assert all(isinstance(weight, np.ndarray) for weight in result.weights.values())
    assert shared.tolist() == [0.0, 1.0, 2.0]


def test_the_result_of_the_last_round_is_kept_and_an_actor_without_a_unit_counts_as_used():
    actor = ControlUnitActor(setup_of("kept"))
    assert actor.in_use() and actor.kept(1) == []
    for number in (1, 2):
        actor.keep(number, [f"result {number}"])
    assert actor.kept(2) == ["result 2"] and actor.kept(1) == []
    actor.close()
