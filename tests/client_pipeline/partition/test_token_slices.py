"""Token slices of a causal model's blocks: gradients of the whole sequence, to the last digits of float64."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts, without_dropout
from client_pipeline.families.sliceable import check_token_slices
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.partition.token_slices import joined_slices, slice_lengths, token_slices
from helpers.tiny_models import CLASSIC, tiny_batch, tiny_spec

LENGTH = 9
CAUSAL = [
    "gpt2",
    "gpt2-untied",
    "llama",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
]


def double_parts(name, **config):
    spec = tiny_spec(name, dropout=0.0)
    parts = build_parts(replace(spec, config=spec.config | config), seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.double().train()
    return parts


def whole_gradients(parts, x_BTD, mask_BT, gradient_BTD):
    x_BTD = x_BTD.clone().requires_grad_()
    mask = parts.mask_form(mask_BT, x_BTD.dtype)
    y_BTD = x_BTD
    for block in parts.blocks:
        y_BTD = block(y_BTD, mask)
    y_BTD.backward(gradient_BTD)
    return y_BTD.detach(), x_BTD.grad, taken(parts)


def taken(parts):
    gradients = {name: p.grad.clone() for name, p in parts.blocks.named_parameters()}
    parts.blocks.zero_grad(set_to_none=True)
    return gradients


def sliced_gradients(parts, x_BTD, mask_BT, gradient_BTD, num_slices, recompute=False):
    """Slice by slice through all blocks and back, as a stage does it."""
    slices, lengths = token_slices(mask_BT, num_slices), slice_lengths(LENGTH, num_slices)
    inputs = [x.clone().requires_grad_() for x in x_BTD.split(lengths, dim=1)]

    def through(x_BTD, part):
        for block in parts.blocks:
            x_BTD = block(x_BTD, part)
        return x_BTD

    with torch.set_grad_enabled(not recompute):
        outputs = [through(x, part) for x, part in zip(inputs, slices, strict=True)]
    gradients = gradient_BTD.split(lengths, dim=1)
    for q in reversed(range(num_slices)):
        y_BTD = through(inputs[q], slices[q]) if recompute else outputs[q]
        y_BTD.backward(gradients[q])
        slices[q].forget()
    assert not any(part.nbytes for part in slices)
    return joined_slices([y.detach() for y in outputs]), joined_slices([x.grad for x in inputs]), taken(parts)


def assert_slices_equal_whole(parts, num_slices, padded=True, recompute=False):
    mask_BT = tiny_batch(parts.spec, size=3, length=LENGTH, padded=padded)["attention_mask"]
    generator = torch.Generator().manual_seed(5)
    x, gradient = (torch.randn(3, LENGTH, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = whole_gradients(parts, x, mask_BT, gradient)
    found = sliced_gradients(parts, x, mask_BT, gradient, num_slices, recompute)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-10, atol=1e-12)
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num_slices", [2, 4, LENGTH])
@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_over_slices_are_those_of_the_whole_sequence_in_float64(name, num_slices):
    assert_slices_equal_whole(double_parts(name), num_slices)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])
def test_also_without_padding_and_computed_twice(name):
    parts = double_parts(name)
    assert_slices_equal_whole(parts, 3, padded=False)
    assert_slices_equal_whole(parts, 3, recompute=True)


def test_positions_turn_as_in_the_whole_sequence_where_that_depends_on_its_length():
    """Dynamic rotary embeddings stretch once a sequence is longer than the model was made for; a slice never is."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    parts = double_parts("llama", rope_parameters=rope, max_position_embeddings=4)
    assert_slices_equal_whole(parts, 3)


def test_gradients_of_kept_keys_are_part_of_them():
    """Without them the comparison above would fail: what is kept has a gradient, and it is not small."""
    parts = double_parts("llama")
    mask_BT = torch.ones(1, LENGTH, dtype=torch.bool)
    x, gradient = (torch.randn(1, LENGTH, 16, dtype=torch.float64) for _ in range(2))
    first, second = token_slices(mask_BT, 2)
    block = parts.blocks[0]
    with torch.no_grad():
        block(x[:, : first.end], first)
    assert first.nbytes == 2 * 2 * first.end * 4 * 8 and second.nbytes == 0
    block(x[:, first.end :], second).backward(gradient[:, first.end :])
    [(keys, values)] = second.kept._by_layer[0]
    assert keys.shape == (1, 2, first.end, 4) and float(keys.grad.abs().max()) > 1e-4 < float(values.grad.abs().max())


def test_slices_cover_the_sequence_and_longer_ones_come_first():
    slices = token_slices(torch.ones(2, 10, dtype=torch.bool), 4)
    assert [(part.number, part.first, part.end) for part in slices] == [(0, 0, 3), (1, 3, 6), (2, 6, 8), (3, 8, 10)]
    assert {part.length for part in slices} == {10}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            tiny_spec("bert"),
            "expected a decoder-only model, such as llama or gpt2, .* found model.family bert",
        ),
        (tiny_spec("bart"), "found model.family bart with the head seq2seq"),
        (CLASSIC, "found model.family transformer with the head seq2seq"),
        (tiny_spec("gpt2"), r"without dropout, .* found resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1"),
        (
            replace(tiny_spec("llama", dropout=0.0), lora=LoraConfig(dropout=0.2)),
            "found lora.dropout = 0.2; set dropout to 0",
        ),
    ],
    ids=["bert", "bart", "classic", "gpt2", "lora"],
)
def test_other_models_are_refused_by_name(spec, message):
    with pytest.raises(ValueError, match=f"^--token-slices 2: .*{message}"):
        check_token_slices(spec, "--token-slices 2")


def test_a_model_whose_dropout_is_taken_out_is_cut():
    for name in CAUSAL:
        spec = without_dropout(replace(tiny_spec(name), lora=LoraConfig(dropout=0.2)))
        check_token_slices(spec, "here")
        assert spec.lora.rank == LoraConfig().rank
