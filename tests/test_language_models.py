"""Every family's parts compute what the library's own model computes: outputs, loss, every gradient."""

import pytest
import torch
from family_cases import FAMILIES, NUM_BLOCKS, VOCABULARY, family_batch

from client_pipeline.partition import bart, t5
from client_pipeline.partition.families import adapter, build_parts, num_blocks_of, tied_matrices
from client_pipeline.partition.parts import (
    block_weights,
    load_parameters,
    own_parameters,
    part_weights,
    target_weight,
    targets,
)
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.verification import random_batch
from client_pipeline.system.costs import model_costs

every_family = pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)


def library_gradients(parts, batch):
    """Loss sum, gradients of the mean by parameter, and logits of the library's own model."""
    inputs = {**batch, "attention_mask": batch["attention_mask"].long()}
    answer = parts.reference(**inputs)
    answer.loss.backward()
    found = {id(p): p.grad for p in parts.reference.parameters() if p.grad is not None}
    parts.reference.zero_grad(set_to_none=True)
    return answer.loss.item(), found, answer.logits.detach()


@every_family
@pytest.mark.parametrize("padded", [True, False])
def test_loss_and_every_gradient_equal_the_librarys(spec, padded):
    parts = build_parts(spec, seed=1)
    parts.reference.eval()
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    batch = family_batch(spec, padded=padded)
    expected_loss, expected, _ = library_gradients(parts, batch)
    weight = target_weight(targets(batch))
    loss = parts.loss_sum(batch) / weight
    loss.backward()
    named = dict(parts.named_parameters())
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-5)
    assert {id(p) for p in named.values()} >= expected.keys()
    for name, p in named.items():
        found = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(
            found, expected.get(id(p), torch.zeros_like(p)), rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@every_family
def test_outputs_equal_the_librarys(spec):
    parts = build_parts(spec, seed=1)
    for part in (parts.reference, parts.embedding, parts.blocks, parts.head):
        part.eval()
    batch = family_batch(spec)
    _, _, expected = library_gradients(parts, batch)
    with torch.no_grad():
        hidden = parts.encode(batch)
        more = (targets(batch),) if spec.head == "seq2seq" else ()
        found = parts.head.logits(hidden, batch["attention_mask"], *more)
    # T5 begins with large weights, so with large scores.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


@every_family
def test_parts_that_are_built_alone_have_the_same_names_and_compute_the_same(spec):
    whole, family = build_parts(spec, seed=1), adapter(spec.family)
    weights = whole.weights()
    assert num_blocks_of(spec) == len(whole.blocks) == NUM_BLOCKS
    embedding, head = family.build_embedding(spec), family.build_head(spec)
    blocks = [family.build_block(spec, i) for i in range(NUM_BLOCKS)]
    load_parameters(own_parameters(embedding), part_weights(weights, "embedding"), "embedding")
    load_parameters(own_parameters(head), part_weights(weights, "head"), "decoder")
    for i, block in enumerate(blocks):
        load_parameters(own_parameters(block), block_weights(weights, i), f"TEB {i}")

    for part in (whole.embedding, whole.blocks, whole.head, embedding, head, *blocks):
        part.eval()
    batch = family_batch(spec)
    tied = {name: embedding.get_parameter(own) for name, own in tied_matrices(spec).items()}
    assert tied.keys() == whole.tied.keys() == head.tied.keys()
    with torch.no_grad():
        x_BTD = embedding(batch)
        assert x_BTD.shape == (7, 9, family.width(spec))
        for block in blocks:
            x_BTD = block(x_BTD, family.mask_form(batch["attention_mask"], x_BTD.dtype))
        torch.testing.assert_close(x_BTD, whole.encode(batch))
        loss = torch.func.functional_call(head, tied, (x_BTD, batch["attention_mask"], targets(batch)))
        torch.testing.assert_close(loss, whole.loss_sum(batch))


@every_family
def test_no_parameter_appears_twice_and_a_tied_one_is_the_embeddings(spec):
    parts = build_parts(spec, seed=1)
    names = parts.weights()
    tied = {f"head.{name}": f"embedding.{own}" for name, own in parts.tied.items()}
    assert not names.keys() & tied.keys() and names.keys() >= set(tied.values())
    expected = sum(p.numel() for p in parts.reference.parameters() if p.requires_grad)
    if not tied and spec.head == "seq2seq" and hasattr(parts.reference.model, "shared"):
        expected -= parts.reference.model.shared.weight.numel()  # untied, the library has it without using it
    assert sum(value.numel() for value in names.values()) == expected


@every_family
def test_a_specification_survives_json_and_has_costs_and_random_batches(spec):
    assert ModelSpec.from_json(spec.to_json()) == spec
    batch = random_batch(spec, 3, 8)
    assert torch.isfinite(build_parts(spec, seed=0).loss_sum(batch))
    one, two = (model_costs(spec, sequence_length=8, batch_size=2, local_steps=n) for n in (1, 2))
    tied = sum(8 * 4 * VOCABULARY * 16 for _ in tied_matrices(spec))
    activations = 2 * 8 * 4 * 8 * adapter(spec.family).width(spec)
    assert two.upload_time_bits - one.upload_time_bits == activations + tied


def test_a_trained_bias_of_the_logits_is_a_parameter():
    # The library has it as a buffer, which no weights of a round would bring to where the decoder is trained.
    model = build_parts(FAMILIES["marian"], seed=1).reference.eval()
    assert bart.spec_from_model(model) == FAMILIES["marian"]
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    spec = bart.spec_from_model(model)
    with pytest.raises(ValueError, match="trained_logits_bias: expected True"):
        bart.split(model, FAMILIES["marian"])
    parts, batch = bart.split(model, spec), family_batch(spec)
    assert torch.equal(parts.weights()["head.final_logits_bias"], model.final_logits_bias)
    assert own_parameters(adapter("marian").build_head(spec))["final_logits_bias"].shape == (1, VOCABULARY)
    loss, _, _ = library_gradients(parts, batch)
    assert float(parts.loss_sum(batch).detach()) / target_weight(targets(batch)) == pytest.approx(loss, rel=1e-5)


def test_the_specification_of_a_t5_says_whether_its_output_layer_is_its_own():
    for name in ("t5", "t5-1.1"):
        assert t5.spec_from_model(build_parts(FAMILIES[name], seed=1).reference) == FAMILIES[name]
    with pytest.raises(ValueError, match="own_lm_head: expected True"):
        t5.split(build_parts(FAMILIES["t5-1.1"], seed=1).reference, FAMILIES["t5"])


def test_labels_of_a_causal_model_have_no_loss_at_the_first_position():
    spec = FAMILIES["gpt2"]
    batch = family_batch(spec)
    batch["labels"][2, 0] = 7
    with pytest.raises(ValueError, match="expected -100 at the first position"):
        build_parts(spec, seed=0).loss_sum(batch)


@pytest.mark.parametrize("server_layers", [-1, NUM_BLOCKS + 2, "two"])
def test_a_causal_model_leaves_the_devices_at_least_one_block(server_layers):
    spec = FAMILIES["llama"]
    spec = ModelSpec(family="llama", head=spec.head, config={**spec.config, "server_layers": server_layers})
    with pytest.raises(ValueError, match="model.server-layers: expected 0 to 6"):
        num_blocks_of(spec)


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_another_head_is_refused(family):
    spec = ModelSpec(family=family, head="sequence-classification", config=FAMILIES[family].config)
    with pytest.raises(ValueError, match=f"model.family {family} has the heads"):
        build_parts(spec, seed=0)


def test_skipped_layers_are_refused():
    spec = ModelSpec(family="bart", head="seq2seq", config={**FAMILIES["bart"].config, "encoder_layerdrop": 0.1})
    with pytest.raises(ValueError, match="encoder_layerdrop: expected 0, found 0.1"):
        build_parts(spec, seed=0)
