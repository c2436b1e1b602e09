"""A backward pass in two parts gives what one in one part gives, for every family; and what waits in between."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from helpers.tiny_models import CLASSIC, CONFIGS, NUM_BLOCKS, VARIANTS, tiny_spec

STEP = StepId(seed=3, round=1, step=1, cluster=0)
SPECS = {"classic": CLASSIC, **{name: tiny_spec(name) for name in (*CONFIGS, *VARIANTS)}}


def passes(spec, splits, *, recompute=False, precision="float32", in_between=lambda stage, i: None, lora=None):
    """Two micro-batches through all TEBs; weight gradients, if apart, after both, the second micro-batch's first."""
    spec = replace(spec, lora=lora)
    parts = build_parts(spec, seed=1)
    stage = Stage(spec, OptimizerConfig(name="sgd"), recompute, precision)
    weights, frozen = parts.weights(), parts.frozen_weights()
    for i in range(NUM_BLOCKS):
        stage.place(i, MovedBlock(block_weights(weights, i), frozen=block_weights(frozen, i)))
    generator = torch.Generator().manual_seed(0)
    family = family_named(spec.family)
    carried, width = family.carried_examples(spec), family.width(spec)
    x = [torch.randn(n + carried, 9, width, generator=generator) for n in (3, 2)]
    g = [torch.randn(n, 9, width, generator=generator) for n in (3, 2)]
    masks = [torch.arange(9) < torch.tensor([[9], [6], [8]])[:n] for n in (3, 2)]
    outputs = [stage.forward(STEP, i, x[i].clone(), masks[i], splits=splits) for i in (0, 1)]
    inputs = []
    for i in (0, 1):
        gradient = g[i] if len(outputs[i]) == len(g[i]) else torch.randn(outputs[i].shape, generator=generator)
        inputs.append(stage.backward(STEP, i, gradient, masks[i]))
        in_between(stage, i)
    for i in (0, 1) if splits else ():
        stage.backward_weights(i)
    return stage, inputs


def assert_equal_gradients(found, expected, exact=False):
    gradients = found[0].gradients()
    for i, blocks in expected[0].gradients().items():
        for name, gradient in blocks.items():
            tolerance = (0.0, 0.0) if exact else (1e-5, 1e-6 * max(1.0, float(gradient.abs().max())))
            torch.testing.assert_close(
                gradients[i][name], gradient, rtol=tolerance[0], atol=tolerance[1], msg=f"{i}.{name}"
            )
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_gradients_in_two_parts_are_those_in_one(name):
    assert_equal_gradients(passes(SPECS[name], True), passes(SPECS[name], False))


@pytest.mark.parametrize("name", ["classic", "gpt2", "llama-tied"])
def test_gradients_in_two_parts_under_recomputation_and_in_mixed_precision(name):
    for more in ({"recompute": True}, {"precision": "bfloat16"}):
        assert_equal_gradients(passes(SPECS[name], True, **more), passes(SPECS[name], False, **more))


@pytest.mark.parametrize("name", ["classic", "bert", "gpt2", "llama"])
def test_matrices_have_no_gradient_before_their_turn_and_norms_have_theirs(name):
    def look(stage, i):
        for block in stage.blocks.values():
            for key, parameter in block.parameters.items():
                in_norm = any(part in key.lower() for part in ("norm", "ln_"))
                # GPT-2's LayerNorms have vectors alone, and so have the others'.
                assert (parameter.grad is not None) == in_norm, key

    passes(SPECS[name], True, in_between=look)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_frozen_weights_the_adapters_alone_wait(name):
    lora = LoraConfig(rank=2, alpha=4.0)
    waiting = []
    both = [
        passes(
            SPECS[name],
            splits,
            lora=lora,
            in_between=lambda stage, i: waiting.append(stage.activations.peak_bytes),
        )
        for splits in (True, False)
    ]
    assert_equal_gradients(*both)
    assert all(p.grad is None for block in both[0][0].blocks.values() for p in block.frozen.values())
