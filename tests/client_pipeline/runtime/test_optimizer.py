"""Optimizers of parts together equal one optimizer of the whole, and learning rates follow their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import own_parameters
from client_pipeline.runtime.stage.learning_rate import LEARNING_RATE_SCHEDULES, OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale, copied_states, put_back_states
from helpers.tiny_models import tiny_spec


def rates(num_steps, **config):
    config = OptimizerConfig(lr=2.0, **config)
    return [config.learning_rate(step) for step in range(1, num_steps + 1)]


# Learning rates.


@pytest.mark.parametrize("schedule", LEARNING_RATE_SCHEDULES)
def test_the_warm_up_grows_linearly_to_the_peak(schedule):
    found = rates(4, schedule=schedule, warmup_steps=4, total_steps=10)
    assert found == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [1.5, 1.0, 0.5, 0.0, 0.0]),
        ("cosine", [1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0, 0.0]),
        ("inverse-sqrt", [2 * math.sqrt(2 / step) for step in (3, 4, 5, 6, 7)]),
    ],
)
def test_the_rate_after_the_warm_up_follows_the_schedule(schedule, expected):
    assert rates(7, schedule=schedule, warmup_steps=2, total_steps=5)[2:] == pytest.approx(expected, abs=1e-12)


def test_without_warm_up_the_first_step_has_almost_the_peak_rate():
    assert rates(1) == [2.0]
    assert rates(1, schedule="linear", total_steps=9) == pytest.approx([1.8])
    assert rates(2, schedule="inverse-sqrt") == pytest.approx([2.0, math.sqrt(2.0)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adam"}, "optimizer.name: expected sgd or adamw, found 'adam'"),
        ({"schedule": "step"}, "optimizer.schedule: expected one of constant, linear, cosine, inverse-sqrt, found 'st"),
        ({"lr": 0.0}, "optimizer.lr: expected a number above 0, found 0.0"),
        ({"lr": math.nan}, "optimizer.lr: expected a number above 0, found nan"),
        ({"weight_decay": -1.0}, "optimizer.weight-decay: expected at least 0, found -1.0"),
        ({"warmup_steps": -1}, "optimizer.warmup-steps: expected at least 0, found -1"),
        ({"clip_norm": math.inf}, "optimizer.clip-norm: expected at least 0, found inf"),
        ({"eps": -1e-9}, "optimizer.eps: expected at least 0, found -1e-09"),
        ({"beta2": 1.0}, r"optimizer.beta2: expected a number in \[0, 1\), found 1.0"),
    ],
)
def test_a_configuration_that_cannot_train_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**config)


# Steps.


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def set_gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def torch_optimizer(module, config):
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
        OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1, schedule="cosine", warmup_steps=2, total_steps=6),
    ],
    ids=["sgd", "adamw"],
)
def test_optimizers_of_parts_equal_one_optimizer_of_the_union(config):
    whole, parts = model(), model()
    one = torch_optimizer(whole, config)
    several = [PartOptimizer(dict(part.named_parameters()), config) for part in parts]
    for step in range(1, 6):
        set_gradients(whole, step)
        set_gradients(parts, step)
        for group in one.param_groups:
            group["lr"] = config.learning_rate(step)
        one.step()
        for part in several:
            part.apply(step)
    for expected, found in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_weight_decay_pulls_matrices_only():
    module = model()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    PartOptimizer(dict(module.named_parameters()), OptimizerConfig(lr=0.1, weight_decay=0.5)).apply(1)
    for name, parameter in module.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


@pytest.mark.parametrize(
    ("family", "more", "biases"),
    [
        ("marian", {"trained_logits_bias": True}, {"head.final_logits_bias"}),
        (
            "t5",
            {},
            {
                "embedding.relative_attention_bias.weight",
                "head.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            },
        ),
    ],
)
def test_weight_decay_leaves_out_biases_that_are_matrices(family, more, biases):
    spec = tiny_spec(family)
    parts = build_parts(replace(spec, config={**spec.config, **more}), seed=0)
    for parameter in dict(parts.named_parameters()).values():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    for part in (parts.embedding, *parts.blocks, parts.head):
        PartOptimizer(own_parameters(part), OptimizerConfig(lr=0.1, weight_decay=0.5)).apply(1)
    found = dict(parts.named_parameters())
    assert all(found[name].ndim == 2 for name in biases)
    for name, parameter in found.items():
        factor = 1.0 if parameter.ndim < 2 or name in biases else 0.95
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, factor), msg=name)


def test_a_step_scales_the_waiting_gradients_and_forgets_them():
    module = nn.Linear(3, 2)
    before = [p.detach().clone() for p in module.parameters()]
    set_gradients(module, 1)
    waiting = [p.grad.clone() for p in module.parameters()]
    optimizer = PartOptimizer(dict(module.named_parameters()), OptimizerConfig(name="sgd", lr=0.5))
    assert optimizer.gradient_norm_sq() == pytest.approx(sum(float(g.square().sum()) for g in waiting))
    optimizer.apply(1, scale=0.25)
    for parameter, old, gradient in zip(module.parameters(), before, waiting, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * 0.25 * gradient)
        assert parameter.grad is None
    assert optimizer.gradient_norm_sq() == 0.0


def test_discarded_gradients_are_not_applied():
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    set_gradients(module, 1)
    optimizer = PartOptimizer(dict(module.named_parameters()), OptimizerConfig(name="sgd", lr=0.5))
    optimizer.discard()
    optimizer.apply(1)
    assert torch.equal(module.weight, before)


# Clipping.


@pytest.mark.parametrize(
    ("clip_norm", "norm_sq", "scale"), [(0.0, 100.0, 1.0), (1.0, 4.0, 0.5), (1.0, 0.25, 1.0), (1.0, 0.0, 1.0)]
)
def test_clip_scale_is_the_smaller_of_one_and_clip_over_norm(clip_norm, norm_sq, scale):
    assert clip_scale(clip_norm, norm_sq) == pytest.approx(scale)


def test_clipping_parts_by_the_whole_norm_equals_torchs_clipping():
    whole, parts = model(), model()
    set_gradients(whole, 1)
    set_gradients(parts, 1)
    optimizers = [PartOptimizer(dict(p.named_parameters()), OptimizerConfig(name="sgd", lr=1.0)) for p in parts]
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    scale = clip_scale(0.5, sum(o.gradient_norm_sq() for o in optimizers))
    for optimizer in optimizers:
        optimizer.apply(1, scale)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter -= parameter.grad
    for expected, found in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_states_are_put_back_and_one_without_a_copy_begins_anew():
    first, second = (PartOptimizer({"w": nn.Parameter(torch.ones(2, 3))}, OptimizerConfig()) for _ in range(2))
    for optimizer in (first, second):
        optimizer.parameters["w"].grad = torch.ones(2, 3)
        optimizer.apply(1)
    (before,) = copied_states([first])
    # Two moments of six numbers, and the step.
    assert first.state_bytes() == (2 * 6 + 1) * 4
    first.parameters["w"].grad = torch.ones(2, 3)
    first.apply(2)
    put_back_states([first, second], [before])
    assert all(value.equal(before[name]) for name, value in first.state().items())
    assert second.state() == {} and second.state_bytes() == 0
