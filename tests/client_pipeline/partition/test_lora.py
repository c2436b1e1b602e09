"""Models with adapters: every family, cut, merged, trained by two clusters, against oracles without adapters."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_block, build_head, build_parts, merged
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.runtime.stage.whole import whole_step
from flower_app.tasks.base import Prepared
from helpers.family_cases import CUTS, STEP, assert_all_close, every_case, split_step
from helpers.federated_rounds import LR, central_gradient, control_units, federated_round
from helpers.tiny_models import CLASSIC, NUM_BLOCKS, evaluation, tiny_batch, tiny_spec

LORA = LoraConfig(rank=2, alpha=6.0)
SCALE = 3.0
"""alpha / r."""
SGD = OptimizerConfig(name="sgd", lr=LR)


def perturbed(spec, seed=1):
    """A model whose adapters are no longer zero."""
    parts = build_parts(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return parts


@pytest.mark.slow
@every_case
def test_every_family_takes_adapters_and_its_cut_model_trains_as_the_whole_one(name, head):
    spec = replace(tiny_spec(name, head, dropout=0.0), lora=LORA)
    parts, batch = perturbed(spec), tiny_batch(spec)
    trained = [n for n in parts.weights() if not n.startswith("head.")]
    assert trained and all(".lora_" in n for n in trained)
    assert {int(n.split(".")[1]) for n in trained} == set(range(len(parts.blocks)))
    for m, cut in zip((1, 3), CUTS[:2], strict=True):
        whole = whole_step(parts, STEP, batch, m)
        loss, gradients = split_step(spec, parts.weights(), batch, cut, m, parts.frozen_weights())
        assert loss == pytest.approx(whole.loss_sum / whole.weight, rel=1e-5)
        largest = max(float(g.abs().max()) for g in whole.gradients.values())
        assert_all_close(gradients, whole.gradients, rtol=1e-3, atol=1e-6 * max(1.0, largest))


@pytest.mark.slow
@every_case
def test_a_merged_model_computes_what_the_adapted_one_does_and_keeps_its_reference(name, head):
    spec = tiny_spec(name, head, dropout=0.0)
    adapted = evaluation(perturbed(replace(spec, lora=LORA)))
    plain, batch = evaluation(merged(adapted)), tiny_batch(spec)
    assert plain.spec == spec
    expected = adapted.logits(batch).detach()
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(plain.logits(batch).detach(), expected, rtol=1e-4, atol=1e-5 * scale)
    inputs = {**batch, "attention_mask": batch["attention_mask"].long()}
    torch.testing.assert_close(plain.reference(**inputs).logits.detach(), expected, rtol=1e-4, atol=1e-5 * scale)
    # The base alone computes something else.
    base = evaluation(build_parts(spec, seed=1))
    assert not torch.allclose(base.logits(batch).detach(), expected, rtol=1e-4, atol=1e-5 * scale)


def test_gradients_of_the_factors_follow_from_that_of_the_merged_matrix():
    """W = W0 + s B A: dA = s B'dW and dB = s dW A', with dW of a model that knows no adapters."""
    spec = tiny_spec("bert", dropout=0.0)
    adapted, batch = perturbed(replace(spec, lora=LORA)), tiny_batch(spec)
    plain = whole_step(merged(adapted), STEP, batch, 3).gradients
    found, weights = whole_step(adapted, STEP, batch, 3).gradients, adapted.weights()
    for index in range(NUM_BLOCKS):
        for layer in ("query", "value"):
            name = f"blocks.{index}.attention.self.{layer}"
            a, b = (weights[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
            matrix = plain[f"{name}.weight"]
            torch.testing.assert_close(
                found[f"{name}.lora_A.default.weight"], SCALE * b.T @ matrix, rtol=1e-4, atol=1e-7
            )
            torch.testing.assert_close(
                found[f"{name}.lora_B.default.weight"], SCALE * matrix @ a.T, rtol=1e-4, atol=1e-7
            )


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone():
    spec = tiny_spec("roberta", dropout=0.0)
    base, adapted = (evaluation(build_parts(s, seed=5)) for s in (spec, replace(spec, lora=LORA)))
    assert torch.equal(base.logits(tiny_batch(spec)), adapted.logits(tiny_batch(spec)))
    again, other = (build_parts(replace(spec, lora=LORA), seed=seed).weights() for seed in (5, 6))
    assert all(torch.equal(value, again[name]) for name, value in adapted.weights().items())
    factors = [name for name in again if ".lora_A." in name]
    assert not any(torch.equal(other[name], again[name]) for name in factors)


@pytest.mark.slow
def test_a_prepared_model_adapts_the_weights_that_it_starts_from():
    spec = tiny_spec("bert", dropout=0.0)
    start = build_parts(spec, seed=9).weights()
    prepared = Prepared(
        spec=replace(spec, lora=LORA), tokenizer_json="", evaluator=None, cluster_sizes=(1,), weights=start
    )
    plain = merged(prepared.build(seed=0)).weights()
    assert all(torch.equal(plain[name], value) for name, value in start.items())
    fresh, built = (p.weights() for p in (prepared.build(seed=0), build_parts(replace(spec, lora=LORA), seed=0)))
    factors = [name for name in fresh if ".lora_A." in name]
    assert factors and all(torch.equal(fresh[name], built[name]) for name in factors)


def test_a_moving_teb_takes_its_frozen_weights_along():
    spec = replace(tiny_spec("bert", dropout=0.0), lora=LORA)
    parts = perturbed(spec)
    frozen = {n.removeprefix("blocks.2."): v for n, v in parts.frozen_weights().items() if n.startswith("blocks.2.")}
    source, target = Stage(spec, SGD), Stage(spec, SGD)
    source.place(2, source_block(parts, 2, frozen))
    assert not source.states()[2].frozen  # a checkpoint leaves out what the set-up brings again
    target.place(2, source.take(2))
    moved = dict(target.blocks[2].module.named_parameters())
    for name, parameter in parts.blocks[2].named_parameters():
        assert torch.equal(moved[name], parameter)
    with pytest.raises(ValueError, match=r"TEB 1 \(frozen\) do not fit: missing"):
        target.place(1)


def source_block(parts, index, frozen):
    prefix = f"blocks.{index}."
    weights = {n.removeprefix(prefix): v for n, v in parts.weights().items() if n.startswith(prefix)}
    return MovedBlock(weights, {}, frozen)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("quarry", "lora.targets: no layer 'quarry' in a TEB; expected all-linear or some of .*attention.self.query"),
        ("query,,value", "lora.targets: expected names separated by commas"),
    ],
)
def test_unknown_targets_are_refused_by_name(targets, said):
    with pytest.raises(ValueError, match=said):
        build_block(replace(tiny_spec("bert"), lora=LoraConfig(targets=targets)), 0)


def test_targets_may_be_named_by_their_last_part_or_be_all():
    def adapted(targets):
        block = build_block(replace(tiny_spec("bert"), lora=LoraConfig(targets=targets)), 0)
        return [n.removesuffix(".lora_A.default.weight") for n, p in block.named_parameters() if ".lora_A." in n]

    assert adapted("key, attention.output.dense") == ["attention.self.key", "attention.output.dense"]
    assert len(adapted("all-linear")) == 6
    assert adapted("dense") == ["attention.output.dense", "intermediate.dense", "output.dense"]


@pytest.mark.parametrize(
    ("name", "targets", "adapted"),
    [
        ("t5", "o", ["layer.layer.0.SelfAttention.o"]),
        ("t5", "q, o", ["layer.layer.0.SelfAttention.q", "layer.layer.0.SelfAttention.o"]),
        ("t5", "wo", ["layer.layer.1.DenseReluDense.wo"]),
        ("gpt2", "attn.c_proj", ["layer.attn.c_proj"]),
        ("gpt2", "proj", None),
        ("bert", "output.dense", ["attention.output.dense", "output.dense"]),
        ("bert", "put.dense", None),
    ],
)
def test_a_target_is_one_or_more_whole_parts_of_a_name(name, targets, adapted):
    """T5's ``wo`` ends with the ``o`` of its attention."""
    spec = replace(tiny_spec(name), lora=LoraConfig(targets=targets))
    if adapted is None:
        with pytest.raises(ValueError, match=f"lora.targets: no layer {targets!r} in a TEB"):
            build_block(spec, 0)
        return
    block = build_block(spec, 0)
    names = [n.removesuffix(".lora_A.default.weight") for n, _ in block.named_parameters() if ".lora_A." in n]
    assert sorted(names) == sorted(adapted)


TIED = (("bert", "masked-lm"), ("gpt2", "causal-lm"), ("t5", "seq2seq"), ("bart", "seq2seq"), ("marian", "seq2seq"))


@pytest.mark.parametrize(("name", "head"), TIED)
def test_a_head_over_a_frozen_embedding_is_tied_to_nothing(name, head):
    """Else the server would wait for a matrix that nobody sends, and train one that nobody else has."""
    plain = tiny_spec(name, head, dropout=0.0)
    assert build_parts(plain, seed=0).tied
    parts = build_parts(replace(plain, lora=LORA), seed=0)
    for own in (parts.head, build_head(parts.spec)):
        trainer = HeadTrainer(own, SGD, unit=NUM_BLOCKS)
        assert trainer.tied == {}
        shared = {parts.head.get_parameter(n).shape for n in build_parts(plain, seed=0).tied}
        assert not any(value.shape in shared for value in trainer.parameters.values())
    embedding = {id(parameter) for parameter in parts.embedding.parameters()}
    assert not any(id(parameter) in embedding for _, parameter in parts.named_parameters())


@pytest.mark.parametrize(("key", "value"), [("rank", 0), ("alpha", 0.0), ("dropout", 1.0)])
def test_adapters_that_cannot_be_are_refused_with_their_key(key, value):
    with pytest.raises(ValueError, match=rf"lora\.{key}: expected .*, found {value}"):
        LoraConfig(**{key: value})


def test_a_specification_with_adapters_crosses_the_network():
    spec = replace(tiny_spec("bert"), lora=LoraConfig(rank=3, targets="query"))
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("name", "first_block"), [("classic", 0), ("classic", 3), ("classic", NUM_BLOCKS), ("bert-masked-lm", 0)]
)
def test_two_clusters_with_one_sgd_step_equal_one_central_step_on_the_joint_batch(served, name, first_block):
    # A frozen word embedding is also the output layer of the masked-lm head.
    plain = CLASSIC if name == "classic" else tiny_spec("bert", "masked-lm")
    spec = replace(plain, lora=LoraConfig(rank=2, dropout=0.1, first_block=first_block))
    batches = [tiny_batch(spec, size=7, length=9, seed=1), tiny_batch(spec, size=5, length=6, seed=2)]
    service, weights = served(SGD, "step", spec)
    base = build_parts(spec, seed=1).frozen_weights()
    assert not service.trainer.tied
    units = control_units(batches, SGD, f"lora-{name}-{first_block}", spec=spec, frozen=base)
    expected = dict(weights)
    try:
        for number in (1, 2):
            gradients, _ = central_gradient(batches, expected, spec, frozen=base, round_=number)
            expected = {key: value - LR * gradients[key] for key, value in expected.items()}
            weights, results = federated_round(units, service, weights, number)
            assert weights.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6, msg=key)
    finally:
        for unit in units:
            unit.close()
    assert all(".lora_" in key for key in results[0].weights)
    assert {int(key.split(".")[1]) for key in results[0].weights} == set(range(first_block, NUM_BLOCKS))
