"""``lora.first-block``: the TEBs below it have no adapters, and nothing of them is trained or sent."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_head, build_over, build_parts, merged
from client_pipeline.families.fresh_base import FreshBase
from client_pipeline.families.proof import check_cut
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.system.costs import all_teb_costs, model_costs
from helpers.family_cases import STEP, assert_all_close, split_step
from helpers.tiny_models import NUM_BLOCKS, evaluation, tiny_batch, tiny_spec

FAMILIES = [("bert", "sequence-classification"), ("llama", "causal-lm"), ("gpt2", "causal-lm"), ("bart", "seq2seq")]
LORA = LoraConfig(rank=2, alpha=6.0)


def spec_with(first, family="llama", head="causal-lm", **lora):
    return replace(tiny_spec(family, head, dropout=0.0), lora=replace(LORA, first_block=first, **lora))


def stirred(spec):
    """A model whose adapters are no longer zero."""
    parts, generator = build_parts(spec, seed=1), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return parts


@pytest.mark.parametrize(("family", "head"), FAMILIES)
@pytest.mark.parametrize("first", [2, NUM_BLOCKS])
def test_a_cut_model_trains_as_the_whole_one_and_no_teb_below_is_trained(family, head, first):
    spec = spec_with(first, family, head)
    parts, batch = stirred(spec), tiny_batch(spec)
    trained = {int(name.split(".")[1]) for name in parts.weights(head=False)}
    assert trained == set(range(first, NUM_BLOCKS))
    whole = whole_step(parts, STEP, batch, 2)
    loss, gradients = split_step(spec, parts.weights(), batch, (2, 1, 2), 2, parts.frozen_weights())
    assert loss == pytest.approx(whole.loss_sum / whole.weight, rel=1e-5)
    assert all(gradient.any() for name, gradient in whole.gradients.items() if ".lora_A." in name)
    largest = max(float(g.abs().max()) for g in whole.gradients.values())
    assert_all_close(gradients, whole.gradients, rtol=1e-3, atol=1e-6 * max(1.0, largest))


def test_a_merged_model_has_what_the_upper_tebs_learnt():
    adapted = evaluation(stirred(spec_with(2)))
    plain, batch = evaluation(merged(adapted)), tiny_batch(adapted.spec)
    torch.testing.assert_close(plain.logits(batch), adapted.logits(batch), rtol=1e-4, atol=1e-5)
    base = dict(build_parts(replace(adapted.spec, lora=None), seed=1).named_parameters())
    changed = {name.split(".")[1] for name, p in plain.named_parameters(head=False) if not torch.equal(p, base[name])}
    assert changed == {str(index) for index in range(2, NUM_BLOCKS)}


def test_the_servers_blocks_are_counted_on_and_one_at_least_has_adapters():
    spec = spec_with(NUM_BLOCKS, head="causal-lm")
    spec = replace(spec, config=spec.config | {"num_hidden_layers": NUM_BLOCKS + 2, "server_layers": 2})
    spec = replace(spec, lora=replace(spec.lora, head="adapters", first_block=NUM_BLOCKS + 1))
    parts = build_parts(spec, seed=0)
    assert {name.split(".")[2] for name in parts.weights()} == {"1"}
    assert {name.split(".")[1] for name, p in build_head(spec).named_parameters() if p.requires_grad} == {"1"}
    beyond = replace(spec, lora=replace(spec.lora, first_block=NUM_BLOCKS + 2))
    said = f"lora.first-block: expected at most {NUM_BLOCKS + 1}, of {NUM_BLOCKS} TEBs and 2 blocks with adapters"
    with pytest.raises(ValueError, match=said):
        build_parts(beyond, seed=0)


def test_what_is_refused_names_the_key():
    with pytest.raises(ValueError, match="lora.first-block: expected 0 or more, found -1"):
        LoraConfig(first_block=-1)
    said = f"lora.first-block: expected at most {NUM_BLOCKS}, of {NUM_BLOCKS} TEBs, found {NUM_BLOCKS + 1}"
    with pytest.raises(ValueError, match=said):
        build_parts(spec_with(NUM_BLOCKS + 1), seed=0)


def test_a_specification_says_it_only_where_it_is_set():
    assert "first_block" not in spec_with(0).to_json()
    assert ModelSpec.from_json(spec_with(2).to_json()) == spec_with(2)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tebs_below_are_held_in_few_bits_too(dtype):
    spec = replace(spec_with(2), base_dtype=dtype)
    check_cut(spec)
    base = FreshBase(spec, seed=0)
    parts = build_over(spec, base, base.part("head."), seed=0)
    batch = tiny_batch(spec)
    parts.loss_sum(batch).backward()
    trained = {name.split(".")[1] for name, p in parts.named_parameters(head=False) if p.grad is not None}
    assert trained == {str(index) for index in range(2, NUM_BLOCKS)}


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_costs_tell_tebs_with_adapters_from_those_without(family, head):
    spec = spec_with(2, family, head)
    costs = all_teb_costs(spec, 8)
    frozen, adapted = costs[0], costs[2]
    assert frozen.trained_bytes == 0 < adapted.trained_bytes
    assert frozen.backward_flop < adapted.backward_flop
    totals = [each.forward_flop + each.backward_flop for each in costs]
    shares = model_costs(spec, sequence_length=8, batch_size=4).teb_shares
    assert shares == pytest.approx([total / max(totals) for total in totals])
    everywhere = model_costs(replace(spec, lora=LORA), sequence_length=8, batch_size=4)
    few = model_costs(spec, sequence_length=8, batch_size=4)
    assert few.upload_energy_bits < everywhere.upload_energy_bits


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_costs_of_a_cluster_that_trains_nothing_are_those_of_forward_passes(family, head):
    options = dict(sequence_length=8, batch_size=4, recompute=True)
    spec = spec_with(NUM_BLOCKS, family, head)
    both, alone = (model_costs(spec, forward_only=forward_only, **options) for forward_only in (False, True))
    assert (alone.o_f, alone.z_bits, alone.teb_shares) == (both.o_f, both.z_bits, ())
    assert (alone.o_b, alone.g_bits, alone.weight_share) == (0, 0, 0) and both.o_b > both.o_f
    assert alone.memory.block_memory(4) == both.memory.held_bytes < both.block_memory
    assert alone.upload_time_bits == both.upload_time_bits > alone.upload_energy_bits == 0
