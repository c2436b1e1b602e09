"""Every family as a tiny model, and a step over stages that are cut from it."""

import pytest
import torch

from client_pipeline.families.families import build_embedding, build_head, tied as tied_matrices
from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.parts import (
    block_weights,
    frozen_parameters,
    join_weights,
    load_parameters,
    own_parameters,
    part_weights,
    target_weight,
    targets,
)
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import gradients
from client_pipeline.runtime.stage.stage import Stage
from helpers.tiny_models import CASES

CUTS = [(5,), (1, 4), (2, 1, 2), (1, 1, 1, 1, 1)]


SGD = OptimizerConfig(name="sgd", lr=0.1)


STEP = StepId(seed=0, round=1, step=1, cluster=0)


every_case = pytest.mark.parametrize(("name", "head"), CASES)


def split_step(spec, weights, batch, cut, m, frozen=None):
    """Loss and gradients of the same weights on stages, every part built alone."""
    embedding, head = build_embedding(spec).train(), build_head(spec).train()
    if frozen:
        load_parameters(frozen_parameters(embedding), part_weights(frozen, "embedding"), "embedding")
        shared = {name: frozen[f"embedding.{own}"] for name, own in family_named(spec.family).tied(spec).items()}
        load_parameters(frozen_parameters(head), part_weights(frozen, "head") | shared, "head")
    load_parameters(own_parameters(embedding), part_weights(weights, "embedding"), "embedding")
    load_parameters(own_parameters(head), part_weights(weights, "head"), "head")
    tied = {name: embedding.get_parameter(own) for name, own in tied_matrices(spec).items()}
    stages, first = [Stage(spec, SGD) for _ in cut], 0
    for stage, count in zip(stages, cut, strict=True):
        for index in range(first, first + count):
            stage.place(index, MovedBlock(block_weights(weights, index), {}, block_weights(frozen or {}, index)))
        first += count
    total, loss_sum = target_weight(targets(batch)), 0.0
    for i, piece in enumerate(split_batch(batch, m)):
        mask = piece["attention_mask"]
        embedded = embedding(piece)
        x = embedded.detach()
        for stage in stages:
            x = stage.forward(STEP, i, x, mask).detach()
        x.requires_grad_()
        loss = torch.func.functional_call(head, tied, (x, mask, targets(piece)))
        (loss / total).backward()
        loss_sum += float(loss.detach())
        gradient = x.grad
        for stage in reversed(stages):
            gradient = stage.backward(STEP, i, gradient, mask)
        if embedded.requires_grad:
            torch.autograd.backward(embedded, gradient)
    blocks = {index: values for stage in stages for index, values in stage.gradients().items()}
    found = join_weights(gradients(own_parameters(embedding)), blocks, gradients(own_parameters(head)))
    return loss_sum / total, found


def assert_all_close(tensors, expected, rtol, atol):
    """Compare tensors by name as ``torch.testing.assert_close`` does, which says where they differ.

    All are compared at once before: of hundreds of small ones, its checks of each take longer than all else.
    """
    assert tensors.keys() == expected.keys()
    if all(
        tensors[name].shape == value.shape and tensors[name].dtype == value.dtype for name, value in expected.items()
    ):
        joined, joined_expected = (
            torch.cat([each[name].flatten() for name in expected]) for each in (tensors, expected)
        )
        if torch.allclose(joined, joined_expected, rtol=rtol, atol=atol):
            return
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=rtol, atol=atol, msg=lambda s, n=name: f"{n}: {s}")
