"""Token slices through the whole runtime, its actors in threads: losses and gradients of the whole model."""

import contextlib
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.control_unit import verification
from client_pipeline.runtime.control_unit.verification import random_batch, verify_split
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage, StepOrder
from client_pipeline.timetable.schedules import SCHEDULES
from helpers.thread_ray import run_in_threads
from helpers.tiny_models import tiny_batch, tiny_spec

NAMES = ["gpt2", "llama", "llama-tied", "mistral", "qwen2-window", "qwen3"]
STEP = StepId(seed=0, round=1, step=1, cluster=0)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    run_in_threads(monkeypatch)
    monkeypatch.setattr(verification, "private_ray", contextlib.nullcontext)


def plan(delta=(2, 2, 1), order=(2, 0, 1), m=3, **more):
    return ClusterPlan(delta=delta, order=order, m=m, **more)


def verified(spec, cut, length=11, **more):
    batch = random_batch(spec, 7, length)
    found = verify_split(lambda: build_parts(spec, seed=1), cut, batch, **more)
    assert found.passed and max(found.gradients.values()) < 2e-5, found
    return found


@pytest.mark.parametrize("num_slices", [2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_slices_are_those_of_the_whole_model(name, schedule, num_slices):
    spec = tiny_spec(name, dropout=0.0)
    verified(spec, plan(schedule=schedule, token_slices=num_slices))


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_adapters_over_a_frozen_base(name):
    spec = replace(tiny_spec(name, dropout=0.0), lora=LoraConfig(rank=2, targets="all-linear"))
    found = verified(spec, plan(schedule="1f1b", token_slices=3))
    assert any(".lora_" in gradient for gradient in found.gradients)


def test_what_goes_between_devices_in_few_bits_is_cut_row_by_row():
    """A token's row is what is compressed: slices give the bytes of the whole."""
    spec, order = tiny_spec("llama", dropout=0.0), dict(step=STEP, schedule="gpipe", sizes=[2, 1], width=16)
    mask_BT = torch.ones(3, 7, dtype=torch.bool)
    whole, cut = (StepOrder(mask_BT=mask_BT, num_slices=q, **order) for q in (1, 3))
    assert cut.shapes() == [(2, 3, 16), (2, 2, 16), (2, 2, 16), (1, 3, 16), (1, 2, 16), (1, 2, 16)]
    assert sum(b * t for b, t, _ in cut.shapes()) == sum(b * t for b, t, _ in whole.shapes())
    assert [list(cut.numbers(i)) for i in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert spec.head == "causal-lm"


def stage_of(spec, **options):
    parts, stage = build_parts(spec, seed=1), Stage(spec, OptimizerConfig(name="sgd"), **options)
    for index in range(3):
        weights = {name: p.detach().clone() for name, p in parts.blocks[index].named_parameters()}
        stage.place(index, MovedBlock(weights))
    return stage


def step_of(stage, spec, num_slices, batch_size=4, length=12, padded=True):
    """One micro-batch forth and back; returns the stage's gradients and what it stored at its peak."""
    mask_BT = tiny_batch(spec, batch_size, length, padded=padded)["attention_mask"]
    order = StepOrder(step=STEP, schedule="gpipe", sizes=[batch_size], mask_BT=mask_BT, width=16, num_slices=num_slices)
    generator = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(batch_size, length, 16, generator=generator) for _ in range(2))
    masks, lengths = order.masks(), [t for _, t, _ in order.shapes()]
    for number, part in enumerate(x.split(lengths, dim=1)):
        stage.forward(STEP, number, part.clone(), masks[number])
    stored = stage.activations.stored_bytes
    for number in reversed(range(num_slices)):
        stage.backward(STEP, number, gradient.split(lengths, dim=1)[number], masks[number])
    assert stage.activations.stored_bytes == 0
    return {f"{i}.{name}": g for i, of in stage.gradients().items() for name, g in of.items()}, stored


def test_slices_store_keys_and_values_more_than_once_and_recomputing_keeps_inputs_and_them():
    spec = tiny_spec("gpt2", dropout=0.0)
    # Keys and values of three TEBs for a micro-batch.
    keys = 3 * 2 * 4 * 12 * 16 * 4
    stored = {q: step_of(stage_of(spec), spec, q)[1] for q in (1, 2, 4)}
    for q in (2, 4):
        # In the attentions (Q + 1) / 2 times; and for later slices once, but for the last one's. GPT-2's queries still
        # hold the tensor that keys and values were a part of.
        more = keys * ((q + 1) / 2 + (q - 1) / q)
        assert stored[q] - stored[1] == pytest.approx(more, rel=0.1)
    recomputed = {q: step_of(stage_of(spec, recompute=True), spec, q)[1] for q in (1, 4)}
    inputs = 4 * 12 * 16 * 4
    assert recomputed == {1: inputs, 4: inputs + keys * 3 // 4}


def test_slices_of_a_model_that_has_none_are_refused_before_a_device_starts():
    for spec, found in ((tiny_spec("bert"), "bert"), (tiny_spec("llama"), "attention_dropout = 0.1")):
        with pytest.raises(ValueError, match=f"plan: token_slices = 2: .* found .*{found}"):
            verify_split(lambda spec=spec: build_parts(spec, seed=1), plan(token_slices=2), random_batch(spec, 7, 9))
