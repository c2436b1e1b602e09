"""Counted memory of a stage, against what torch stores and against the process's own peak."""

import pytest
import torch

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.held_memory import StoredActivations
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.stage import Stage
from helpers.recovery_cases import SPEC, initial

STEP = StepId(seed=0, round=1, step=1, cluster=0)
MASK_BT = torch.ones(2, 5, dtype=torch.bool)


def stage(recompute=False):
    made = Stage(SPEC, OptimizerConfig(name="adamw"), recompute=recompute)
    made.place(1)
    made.place(2)
    return made


def weight_bytes():
    return sum(v.nbytes for n, v in initial().items() if n.startswith(("blocks.1.", "blocks.2.")))


def x_BTD():
    return torch.randn(2, 5, 16)


def test_weights_gradients_states_and_activations_count():
    made = stage()
    weights = weight_bytes()
    assert made.held_bytes() == 2 * weights
    outputs = [made.forward(STEP, i, x_BTD(), MASK_BT) for i in range(3)]
    one = made.activations.peak_bytes / 3
    # At least the input, the inner layer of both feed-forward networks, and the output of each TEB.
    inner = 2 * 5 * SPEC.config["feed_forward"] * 4
    assert one >= 2 * inner + 3 * x_BTD().nbytes
    assert made.held_bytes() == 2 * weights + 3 * one
    for i, output in enumerate(outputs):
        made.backward(STEP, i, torch.ones_like(output), MASK_BT)
    made.apply(1, 1.0)
    states = sum(t.nbytes for b in made.blocks.values() for t in b.optimizer.state().values())
    assert states > 2 * weights * 0.99 and made.held_bytes() == 2 * weights + states + 3 * one
    made.activations.forget_peak()
    made.backward(STEP, 0, made.forward(STEP, 0, x_BTD(), MASK_BT).detach(), MASK_BT)
    assert made.activations.peak_bytes == one


def test_a_step_that_was_dropped_keeps_nothing():
    made = stage()
    made.forward(STEP, 0, x_BTD(), MASK_BT)
    made.discard()
    made.activations.forget_peak()
    assert made.activations.peak_bytes == 0


def test_recomputing_keeps_the_input_alone():
    made = stage(recompute=True)
    for i in range(2):
        made.forward(STEP, i, x_BTD(), MASK_BT)
    assert made.activations.peak_bytes == 2 * x_BTD().nbytes


@pytest.mark.parametrize("key", [("a",), ("b",)])
def test_another_shape_is_looked_at_anew(key):
    account = StoredActivations()
    x = torch.randn(3, requires_grad=True)
    with account.count(0, ("a",), []):
        x.square().sum()
    with account.count(1, key, []):
        x.square().sum().square()
    assert account.peak_bytes == (24 if key == ("a",) else 28)
