"""Token slices on real Ray actors: the losses of a run, and what it has learned, are those without slices."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights, own_parameters
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from helpers.shared_actors import shared_but
from helpers.tiny_models import NUM_BLOCKS, tiny_batch, tiny_spec

SHARED = shared_but()
ADAMW = OptimizerConfig(name="adamw", lr=1e-2)
STEPS = 4


def trained(name, spec, cut, placement, **runtime):
    """Losses of the steps, and the TEBs' weights after them; each step has a batch of another length."""
    parts = build_parts(spec, seed=1)
    parts.embedding.train()
    optimizer = PartOptimizer(own_parameters(parts.embedding), ADAMW)
    link = LocalDecoder(HeadTrainer(parts.head, ADAMW, unit=NUM_BLOCKS), local_steps=STEPS, timeout_s=240.0)
    pipeline = Pipeline(
        name=name,
        spec=spec,
        optimizer=ADAMW,
        runtime=RuntimeConfig(timeout=240, **runtime),
        placement=placement,
        frozen=parts.frozen_weights(),
    )
    try:
        pipeline.apply_plan(cut)
        weights = parts.weights()
        pipeline.load({i: block_weights(weights, i) for i in range(NUM_BLOCKS)})
        losses = []
        for number in range(1, STEPS + 1):
            step = StepId(seed=0, round=1, step=number, cluster=0)
            outcome = pipeline.run_step(
                step, [tiny_batch(spec, length=7 + number, seed=number)], parts.embedding, link, apply_step=number
            )
            optimizer.apply(number, 1.0)
            link.end_step(1.0)
            losses.append(outcome.loss_sum / outcome.weight)
        return losses, pipeline.weights()
    finally:
        link.close()
        pipeline.close()


@pytest.mark.parametrize(
    ("family", "lora", "schedule", "runtime", "placement"),
    [
        ("llama", None, "gpipe", {}, SHARED),
        ("gpt2", None, "1f1b", {"recompute": "always"}, SHARED),
        # Each device has an actor of its own.
        ("qwen3", LoraConfig(rank=2), "zb-h1", {"devices_per_actor": 1}, Placement()),
    ],
)
def test_a_run_in_slices_has_the_losses_and_the_weights_of_one_without(
    local_ray, family, lora, schedule, runtime, placement
):
    spec = replace(tiny_spec(family, dropout=0.0), lora=lora)
    whole = ClusterPlan(delta=(2, 2, 1), order=(1, 0, 2), m=3, schedule=schedule)
    expected, weights = trained(f"test-whole-{family}", spec, whole, SHARED, **runtime)
    losses, sliced_weights = trained(
        f"test-slices-{family}", spec, replace(whole, token_slices=3), placement, **runtime
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    start = build_parts(spec, seed=1).weights()
    assert not all(torch.equal(weights[i][n], v) for i in weights for n, v in block_weights(start, i).items())
    for index, block in weights.items():
        for name, value in block.items():
            # AdamW divides by the root of squares: where a gradient is all rounding, steps differ.
            torch.testing.assert_close(sliced_weights[index][name], value, rtol=1e-3, atol=2e-4)
