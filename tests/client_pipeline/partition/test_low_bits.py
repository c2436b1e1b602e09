"""Frozen matrices in few bits: what is lost of them, gradients of what is left, and the same numbers cut or whole."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from client_pipeline.families.families import build_block, build_over, build_parts, merged
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.parts import part_weights
from client_pipeline.partition.spec import BASE_DTYPES, LoraConfig, ModelSpec
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.weights.low_bits import LowBitLinear, low_bit_layers, packed, unpacked
from helpers.family_cases import STEP
from helpers.tiny_models import NUM_BLOCKS, evaluation, tiny_batch, tiny_spec

LOW_BITS = BASE_DTYPES[1:]
LORA = LoraConfig(rank=2, alpha=6.0)
FAMILIES = [("llama", "causal-lm"), ("qwen3", "causal-lm"), ("gpt2", "causal-lm"), ("bert", "masked-lm")]


def over_files(folder, name, head, base_dtype, dtype=torch.float32):
    spec = tiny_spec(name, head, dropout=0.0)
    build_parts(spec, seed=3).reference.to(dtype).save_pretrained(folder)
    spec, weights = load_pretrained_weights(str(folder), head, server_layers=spec.config.get("server_layers", 0))
    spec = replace(spec, lora=LORA, base_dtype=base_dtype)
    parts = build_over(spec, weights.base, part_weights(weights, "head"), seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor, parameter in parts.named_parameters():
            if ".lora_B." in factor:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return spec, weights, parts


@pytest.mark.parametrize(
    ("dtype", "bits", "most"), [("bfloat16", 16, 2**-8), ("int8", 8.5, 0.5 / 127), ("nf4", 4.5, 0.16)]
)
def test_a_matrix_comes_back_within_half_a_step_of_its_largest_number_in_as_many_bits(dtype, bits, most):
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 256), (3, 5), (1, 1), (2, 65)):
        matrix = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape[0], 1, generator=generator)
        tensors = packed(matrix, dtype)
        back = unpacked(tensors, dtype, matrix.shape)
        rows = matrix.abs().amax(1, keepdim=True)
        assert ((back - matrix).abs() <= most * rows * (1 + 1e-5)).all()
        # What has come back goes the same way again.
        assert torch.allclose(unpacked(packed(back, dtype), dtype, matrix.shape), back, rtol=1e-6)
    assert 8 * sum(tensor.nbytes for tensor in packed(torch.ones(64, 128), dtype)) <= bits * 64 * 128
    zeros = torch.zeros(2, 70)
    assert torch.equal(unpacked(packed(zeros, dtype), dtype, zeros.shape), zeros)


def test_nf4_takes_the_nearest_of_the_sixteen_values():
    from client_pipeline.weights.low_bits import NF4_VALUES

    levels = torch.tensor(NF4_VALUES)
    row = torch.linspace(-1, 1, 64)[None]
    nearest = levels[(row.T - levels[None]).abs().argmin(1)]
    assert torch.equal(unpacked(packed(row * 3, "nf4"), "nf4", row.shape), nearest[None] * 3)


@pytest.mark.parametrize("dtype", LOW_BITS)
def test_a_layer_in_few_bits_is_the_linear_layer_of_what_its_matrix_has_become(dtype):
    generator = torch.Generator().manual_seed(0)
    matrix, bias = torch.randn(7, 130, generator=generator), nn.Parameter(torch.randn(7, generator=generator))
    straight, turned = LowBitLinear(bias, matrix.shape, dtype, False), LowBitLinear(bias, matrix.shape, dtype, True)
    straight.fill(matrix)
    turned.fill(matrix.T)
    x = torch.randn(2, 3, 130, generator=generator, requires_grad=True)
    outputs = [straight(x), turned(x), F.linear(x, straight.rounded(matrix), bias)]
    seed = torch.randn(2, 3, 7, generator=generator)
    gradients = [torch.autograd.grad(y, x, seed)[0] for y in outputs]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(gradients[0], gradients[2])
    assert torch.equal(turned.rounded(matrix.T), straight.rounded(matrix).T)


@pytest.mark.parametrize("dtype", LOW_BITS)
@pytest.mark.parametrize("place", ["alone", "in a block"])
def test_a_matrix_in_few_bits_goes_where_its_layer_goes(dtype, place):
    """A device puts its TEBs on its accelerator: a matrix that stays on the host cannot be multiplied there."""
    layer = LowBitLinear(nn.Parameter(torch.zeros(3)), torch.Size((3, 70)), dtype, False)
    layer.fill(torch.randn(3, 70))
    (layer if place == "alone" else nn.Sequential(nn.Linear(1, 1), layer)).to("meta")
    assert [tensor.device.type for tensor in (*layer.packed_matrix, layer.bias)] == ["meta"] * (
        1 + len(packed(torch.zeros(3, 70), dtype))
    )
    assert layer(torch.zeros(2, 70, device="meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", LOW_BITS)
@pytest.mark.parametrize(("name", "head"), FAMILIES)
def test_a_cut_model_in_few_bits_learns_as_the_whole_one(name, head, dtype, tmp_path):
    spec, weights, parts = over_files(tmp_path, name, head, dtype)
    batch = tiny_batch(spec)
    whole = whole_step(parts, STEP, batch, 1)
    trained, stage = parts.weights(), Stage(spec, OptimizerConfig(name="sgd"))
    for index in range(NUM_BLOCKS):
        prefix = f"blocks.{index}."
        own = {n.removeprefix(prefix): v for n, v in trained.items() if n.startswith(prefix)}
        stage.place(index, MovedBlock(own, {}, weights.base.part(prefix)))
    module = stage.blocks[0].module
    names = [name for name, _ in low_bit_layers(module)]
    linear = {"llama": 7, "qwen3": 7, "gpt2": 4, "bert": 6}[name]
    assert len(names) == linear
    assert all(p.requires_grad or p.dim() == 1 for p in module.parameters())
    x_BTD = parts.embedding(batch).detach()
    y_BTD = stage.forward(STEP, 0, x_BTD, batch["attention_mask"])
    assert torch.equal(y_BTD, whole.output_BTD)
    hidden = y_BTD.detach().requires_grad_()
    loss = parts.head(hidden, batch["attention_mask"], {"labels": batch["labels"]}) / whole.weight
    stage.backward(STEP, 0, torch.autograd.grad(loss, hidden)[0], batch["attention_mask"])
    for index, gradients in stage.gradients().items():
        for factor, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole.gradients[f"blocks.{index}.{factor}"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", LOW_BITS)
@pytest.mark.parametrize(("name", "head"), FAMILIES)
def test_a_merged_model_computes_what_the_one_in_few_bits_does(name, head, dtype, tmp_path):
    spec, _, parts = over_files(tmp_path, name, head, dtype)
    plain, batch = evaluation(merged(parts)), tiny_batch(spec)
    with torch.no_grad():
        expected = evaluation(parts).logits(batch)
        torch.testing.assert_close(plain.logits(batch), expected, rtol=1e-4, atol=1e-4)
        exact = evaluation(over_files(tmp_path / "exact", name, head, "float32")[2])
        assert not torch.equal(exact.logits(batch), expected)
        # Batches that go through each TEB one after the other.
        together = torch.cat(parts.encode_each([batch, batch]))
        assert torch.equal(together, torch.cat([parts.encode(batch)] * 2))


def test_a_file_of_16_bits_is_held_as_its_own_pages(tmp_path):
    spec, weights, _ = over_files(tmp_path, "llama", "causal-lm", "bfloat16", dtype=torch.bfloat16)
    blocks = [build_block(spec, 1, weights.base.part("blocks.1.")) for _ in range(2)]
    pointers = [{layer.packed_matrix[0].data_ptr() for _, layer in low_bit_layers(block)} for block in blocks]
    assert pointers[0] == pointers[1] and len(pointers[0]) == 7


def test_a_specification_says_its_base_and_is_as_before_where_that_is_float32():
    spec = replace(tiny_spec("llama"), lora=LORA)
    assert "base_dtype" not in spec.to_json()
    small = replace(spec, base_dtype="nf4")
    assert ModelSpec.from_json(small.to_json()) == small and ModelSpec.from_json(spec.to_json()) == spec
