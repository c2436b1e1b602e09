"""Control units, decoder service and averaging together equal one central step, through the real stream and actors."""

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.control_unit.round_order import RoundOrder
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale
from client_pipeline.runtime.stage.whole import whole_step
from helpers.federated_rounds import (
    LR,
    PLANS,
    SHARED_ACTORS,
    OneBatch,
    central_gradient,
    control_units,
    federated_round,
)
from helpers.tiny_models import CLASSIC, tiny_batch


@pytest.mark.promise
@pytest.mark.parametrize(("decoder_sync", "shares_actors"), [("step", False), ("round", True)], ids=["step", "round"])
def test_two_clusters_with_one_sgd_step_equal_one_central_step_on_the_joint_batch(served, decoder_sync, shares_actors):
    # Unequal batches: 7 and 5 examples, different lengths, so that the weights matter.
    batches = [tiny_batch(CLASSIC, size=7, length=9, seed=1), tiny_batch(CLASSIC, size=5, length=6, seed=2)]
    optimizer = OptimizerConfig(name="sgd", lr=LR)
    service, weights = served(optimizer, decoder_sync)
    gradients, loss = central_gradient(batches, weights)
    # Once with an actor for each device; all other tests have them share some.
    placements = [SHARED_ACTORS.placement(n, 3) if shares_actors else Placement() for n in range(2)]
    units = [
        control_units([batch], optimizer, f"joint-{decoder_sync}", first=n, placement=placements[n])[0]
        for n, batch in enumerate(batches)
    ]
    try:
        joined, results = federated_round(units, service, weights)
    finally:
        for unit in units:
            unit.close()
    assert joined.keys() == weights.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(joined[name], weights[name] - LR * gradient, rtol=1e-5, atol=1e-6)
    total = sum(result.weight for result in results)
    assert sum(result.loss * result.weight for result in results) / total == pytest.approx(loss, rel=1e-5)
    assert {result.weight for result in results} == {target_weight(targets(batch)) for batch in batches}


def test_accumulation_schedule_and_clipping_together_equal_central_training(served):
    # One cluster: averaging apart, its steps are those of the whole model. 12 examples in batches of 5, so that batches
    # cross the ends of epochs; AdamW's state lives over rounds, and a plan that moves TEBs in between takes it along.
    examples = tiny_batch(CLASSIC, size=12, length=9, seed=1)
    # A large eps: keys' biases have no gradient but rounding, which AdamW would blow up.
    optimizer = OptimizerConfig(
        lr=0.01, eps=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=2, total_steps=6, clip_norm=0.5
    )
    service, weights = served(optimizer)
    data, order = OneBatch(examples), DataOrder(12, 5, seed=7, cluster=0)
    parts = build_parts(CLASSIC, seed=0)
    parts.load(weights)
    central = PartOptimizer(dict(parts.named_parameters()), optimizer)
    norms = []
    for number, (round_, step) in enumerate(((r, s) for r in (1, 2, 3) for s in (1, 2)), start=1):
        summed, total, m = {}, 0, PLANS[(round_ - 1) % 2].m
        batches = [data.collate(order.next_batch()) for _ in range(3)]
        for i, batch in enumerate(batches):
            name = StepId(seed=7, round=round_, step=step, cluster=0, first=i * m)
            whole = whole_step(parts, name, batch, m)
            total += whole.weight
            for n, gradient in whole.gradients.items():
                summed[n] = summed.get(n, 0) + gradient * whole.weight
        for n, parameter in central.parameters.items():
            parameter.grad = summed[n] / total
        norms.append(central.gradient_norm_sq() ** 0.5)
        central.apply(number, clip_scale(optimizer.clip_norm, norms[-1] ** 2))
    assert min(norms) > optimizer.clip_norm

    units = control_units([examples], optimizer, "accumulated", local_steps=2, batch_size=5, gradient_accumulation=3)
    try:
        for round_ in (1, 2, 3):
            plans = [PLANS[(round_ - 1) % 2]]
            weights, results = federated_round(units, service, weights, round_, local_steps=2, plans=plans)
    finally:
        units[0].close()
    assert results[0].steps == 2 and results[0].report["moved_blocks"] > 0
    for name, value in parts.weights().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)


def test_two_runs_repeat_bit_for_bit(served):
    batches = [tiny_batch(CLASSIC, size=7, length=9, seed=1), tiny_batch(CLASSIC, size=5, length=6, seed=2)]
    optimizer = OptimizerConfig(name="adamw", lr=0.01, clip_norm=1.0)
    ends = []
    for run in range(2):
        service, weights = served(optimizer)
        units = control_units(batches, optimizer, f"repeat-{run}", local_steps=2)
        try:
            for number in (1, 2):
                weights, _ = federated_round(units, service, weights, number, local_steps=2)
        finally:
            for unit in units:
                unit.close()
        ends.append(weights)
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_a_control_unit_without_decoder_address_trains_the_decoder_too(local_ray):
    batch = tiny_batch(CLASSIC, size=7, length=9, seed=1)
    weights = build_parts(CLASSIC, seed=1).weights()
    gradients, _ = central_gradient([batch], weights)
    units = control_units([batch], OptimizerConfig(name="sgd", lr=LR), "alone")
    try:
        result = units[0].train_round(RoundOrder(round=1, weights=weights, plan=PLANS[0]))
    finally:
        units[0].close()
    assert result.weights.keys() == weights.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result.weights[name], weights[name] - LR * gradient, rtol=1e-5, atol=1e-6)
