"""A matrix that embedding and decoder share is trained as one matrix, over the real stream and actors."""

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.whole import whole_step
from helpers.federated_rounds import LR, PLANS, central_gradient, control_units, federated_round
from helpers.tiny_models import tiny_batch, tiny_spec

SPEC = tiny_spec("bert", "masked-lm")
TIED = "embedding.embeddings.word_embeddings.weight"


def batches():
    return [tiny_batch(SPEC, size=7, length=9, seed=1), tiny_batch(SPEC, size=5, length=6, seed=2)]


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def own_gradient(batch, weights, cluster, step):
    parts = build_parts(SPEC, seed=0)
    parts.load(weights)
    name = StepId(seed=7, round=1, step=step, cluster=cluster)
    return whole_step(parts, name, batch, PLANS[cluster].m).gradients


def close(units):
    for unit in units:
        unit.close()


@pytest.mark.parametrize("decoder_sync", ["step", "round"])
def test_two_clusters_with_one_sgd_step_equal_one_central_step_on_the_joint_batch(served, decoder_sync):
    optimizer = OptimizerConfig(name="sgd", lr=LR)
    service, weights = served(optimizer, decoder_sync, SPEC)
    assert TIED in weights and not any("decoder.weight" in name for name in weights)
    gradients, _ = central_gradient(batches(), weights, SPEC)
    units = control_units(batches(), optimizer, f"tied-{decoder_sync}", spec=SPEC)
    try:
        joined, _ = federated_round(units, service, weights)
    finally:
        close(units)
    assert_close(joined, {name: weights[name] - LR * gradient for name, gradient in gradients.items()})


def test_the_second_steps_of_two_clusters_use_each_clusters_own_value(served):
    # With a decoder of each cluster's own, a round of two steps is the mean of two separate trainings.
    optimizer = OptimizerConfig(name="sgd", lr=LR)
    service, weights = served(optimizer, "round", SPEC)
    ends = []
    for n, batch in enumerate(batches()):
        end = weights
        for step in (1, 2):
            gradients = own_gradient(batch, end, n, step)
            end = {name: end[name] - LR * gradient for name, gradient in gradients.items()}
        ends.append(end)
    units = control_units(batches(), optimizer, "tied-own-value", local_steps=2, spec=SPEC)
    try:
        joined, results = federated_round(units, service, weights, local_steps=2)
    finally:
        close(units)
    total = sum(result.weight for result in results)
    mean = {
        name: sum(end[name] * (result.weight / total) for end, result in zip(ends, results, strict=True))
        for name in weights
    }
    assert_close(joined, mean)


def test_clipping_counts_the_whole_gradient_of_a_tied_matrix_once(served):
    clip = 0.05
    optimizer = OptimizerConfig(name="sgd", lr=LR, clip_norm=clip)
    service, weights = served(optimizer, spec=SPEC)
    gradients, _ = central_gradient(batches()[:1], weights, SPEC)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm > clip
    units = control_units(batches()[:1], optimizer, "tied-clipped", spec=SPEC)
    try:
        joined, _ = federated_round(units, service, weights)
    finally:
        close(units)
    assert_close(joined, {name: weights[name] - LR * g * clip / norm for name, g in gradients.items()})
