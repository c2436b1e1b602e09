"""Control units, decoder service and averaging together equal one central step, through the real stream and actors."""

import pytest
import torch
from test_split_equals_whole import CLASSIC, NUM_BLOCKS
from tiny_models import tiny_batch

from client_pipeline.partition.families import build_parts
from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit import ClusterSetup, ControlUnit, RoundOrder
from client_pipeline.runtime.data_order import DataOrder
from client_pipeline.runtime.head import HeadTrainer
from client_pipeline.runtime.optimizer import OptimizerConfig, PartOptimizer, clip_scale
from client_pipeline.runtime.whole import whole_step
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

LR = 0.5
PLANS = [
    ClusterPlan(delta=(2, 3), order=(1, 0), m=3),
    ClusterPlan(delta=(1, 0, 4), order=(0, 2), m=2, schedule="1f1b"),
]


class OneBatch:
    """A cluster's data: one batch, in a fixed order."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["input_ids"])

    def collate(self, indices, seed=0):
        return {name: tensor[sorted(indices)] for name, tensor in self.batch.items()}


def control_units(batches, optimizer, run, local_steps=1, spec=CLASSIC, first=0, **more):
    return [
        ControlUnit(
            ClusterSetup(
                run=run,
                cluster=n,
                spec=spec,
                optimizer=optimizer,
                runtime=RuntimeConfig(timeout=240),
                seed=7,
                local_steps=local_steps,
                load_data=lambda batch=batch: OneBatch(batch),
                **{"batch_size": len(batch["input_ids"]), **more},
            )
        )
        for n, batch in enumerate(batches, start=first)
    ]


def federated_round(units, service, weights, number=1, local_steps=1, codec=None, plans=PLANS):
    """One round as the strategy runs it; returns the new global weights and the results."""
    from concurrent.futures import ThreadPoolExecutor

    tied = {name: weights[f"embedding.{own}"] for name, own in service.trainer.tied.items()}
    addresses = service.open_round(number, range(len(units)), local_steps, tied)
    encoder = {name: value for name, value in weights.items() if not name.startswith("head.")}
    orders = [RoundOrder(round=number, weights=encoder, plan=plans[n], decoder=addresses[n]) for n in range(len(units))]
    with ThreadPoolExecutor(len(units)) as pool:
        results = list(pool.map(lambda pair: pair[0].train_round(pair[1]), zip(units, orders, strict=True)))
    summary = service.finish_round({n: result.weight for n, result in enumerate(results)})
    total = sum(result.weight for result in results)
    trained = [codec.apply(encoder, r.weights) if codec else r.weights for r in results]
    shares = [result.weight / total for result in results]
    joined = {name: sum(t[name] * share for t, share in zip(trained, shares, strict=True)) for name in encoder}
    joined.update({f"head.{name}": value for name, value in summary.head.items()})
    return joined, results


@pytest.fixture
def served(local_ray):
    """Start services over a fresh decoder, and stop them."""
    services = []

    def start(optimizer, decoder_sync="step", spec=CLASSIC, **more):
        parts = build_parts(spec, seed=1)
        trainer = DecoderTrainer(HeadTrainer(parts.head, optimizer, unit=NUM_BLOCKS), decoder_sync)
        service = DecoderService(DecoderConfig(), trainer, num_clusters=2, **more)
        service.start()
        services.append(service)
        return service, parts.weights()

    yield start
    for service in services:
        service.stop()


def central_gradient(batches, weights, spec=CLASSIC, step=1, frozen=None, round_=1):
    """Gradient of the mean over the joint batch, with each cluster's own micro-batches and dropout seeds."""
    total = sum(target_weight(targets(batch)) for batch in batches)
    summed, loss = {}, 0.0
    for n, batch in enumerate(batches):
        parts = build_parts(spec, seed=0)
        parts.load(weights)
        parts.load_frozen(frozen or {})
        whole = whole_step(parts, StepId(seed=7, round=round_, step=step, cluster=n), batch, PLANS[n].m)
        loss += whole.loss_sum / total
        for name, gradient in whole.gradients.items():
            summed[name] = summed.get(name, 0) + gradient * whole.weight / total
    return summed, loss


@pytest.mark.parametrize("decoder_sync", ["step", "round"])
def test_two_clusters_with_one_sgd_step_equal_one_central_step_on_the_joint_batch(served, decoder_sync):
    # Unequal batches: 7 and 5 examples, different lengths, so that the weights matter.
    batches = [tiny_batch(CLASSIC, size=7, length=9, seed=1), tiny_batch(CLASSIC, size=5, length=6, seed=2)]
    optimizer = OptimizerConfig(name="sgd", lr=LR)
    service, weights = served(optimizer, decoder_sync)
    gradients, loss = central_gradient(batches, weights)
    units = control_units(batches, optimizer, f"joint-{decoder_sync}")
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


def test_clipping_uses_the_norm_of_the_whole_model_decoder_included(served):
    batch = tiny_batch(CLASSIC, size=7, length=9, seed=1)
    clip = 0.05
    optimizer = OptimizerConfig(name="sgd", lr=LR, clip_norm=clip)
    service, weights = served(optimizer)
    gradients, _ = central_gradient([batch], weights)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm > clip
    units = control_units([batch], optimizer, "clipped")
    try:
        joined, _ = federated_round(units, service, weights)
    finally:
        units[0].close()
    for name, gradient in gradients.items():
        expected = weights[name] - LR * gradient * clip / norm
        torch.testing.assert_close(joined[name], expected, rtol=1e-4, atol=1e-6)


def test_two_clusters_that_accumulate_count_by_all_batches_of_their_step(served):
    # 8 examples in two batches of 4, and 4 in two of 2, of other lengths: no batch weighs what another does.
    examples = [tiny_batch(CLASSIC, size=8, length=9, seed=1), tiny_batch(CLASSIC, size=4, length=6, seed=2)]
    optimizer = OptimizerConfig(name="sgd", lr=LR)
    service, weights = served(optimizer)
    summed, totals, last = {}, [0, 0], [0, 0]
    for n, (all_examples, size) in enumerate(zip(examples, (4, 2), strict=True)):
        data, order = OneBatch(all_examples), DataOrder(2 * size, size, seed=7, cluster=n)
        parts = build_parts(CLASSIC, seed=0)
        parts.load(weights)
        for i in range(2):
            name = StepId(seed=7, round=1, step=1, cluster=n, first=i * PLANS[n].m)
            whole = whole_step(parts, name, data.collate(order.next_batch()), PLANS[n].m)
            totals[n], last[n] = totals[n] + whole.weight, whole.weight
            for key, gradient in whole.gradients.items():
                summed[key] = summed.get(key, 0) + gradient * whole.weight
    # By the last batch's weight alone the average would be another one.
    assert abs(last[0] / sum(last) - totals[0] / sum(totals)) > 0.005
    units = [
        control_units([one], optimizer, f"both-{n}", batch_size=size, gradient_accumulation=2, first=n)[0]
        for n, (one, size) in enumerate(zip(examples, (4, 2), strict=True))
    ]
    try:
        joined, results = federated_round(units, service, weights)
    finally:
        for unit in units:
            unit.close()
    assert [result.weight for result in results] == totals
    for name, gradient in summed.items():
        torch.testing.assert_close(joined[name], weights[name] - LR * gradient / sum(totals), rtol=1e-5, atol=1e-6)


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
