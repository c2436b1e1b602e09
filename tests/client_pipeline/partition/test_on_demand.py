"""Weights on demand: after a pass that failed a TEB is as empty as after one that did not."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.partition.spec import LoraConfig
from client_pipeline.weights import on_demand
from client_pipeline.weights.low_bits import low_bit_layers
from flower_app.tasks.base import Prepared
from helpers.tiny_models import tiny_batch, tiny_spec

BASE_DTYPES = ("float32", "int8", "nf4")
every_dtype = pytest.mark.parametrize("base_dtype", BASE_DTYPES)


def drawn(base_dtype):
    spec = replace(tiny_spec("llama", "causal-lm", dropout=0.0), lora=LoraConfig(rank=2), base_dtype=base_dtype)
    return Prepared(spec=spec, tokenizer_json="{}", evaluator=None, cluster_sizes=(1,)).build(seed=5)


def held_bytes(block):
    """Bytes of a TEB's frozen weights that are in memory."""
    frozen = [p for p in block.parameters() if not p.requires_grad and p.device.type != "meta"]
    return sum(t.nbytes for t in [*frozen, *(t for _, layer in low_bit_layers(block) for t in layer.packed_matrix)])


@every_dtype
def test_a_pass_that_fails_leaves_no_weights(base_dtype):
    parts = drawn(base_dtype)
    block, batch = parts.blocks[0], tiny_batch(parts.spec)
    x_BTD = parts.embedding(batch)
    mask = parts.mask_form(batch["attention_mask"], x_BTD.dtype)
    expected = block(x_BTD, mask)
    seen = []
    inner = next(module for _, module in block.named_children())
    inner.register_forward_hook(lambda *_: seen.append(held_bytes(block)))
    with pytest.raises(RuntimeError):
        block(x_BTD[:, :, 1:], mask)
    block(x_BTD, mask)
    assert seen and min(seen) > 0
    with pytest.raises(RuntimeError):
        block(x_BTD[:, :, 1:], mask)
    assert held_bytes(block) == 0
    assert torch.equal(block(x_BTD, mask), expected) and held_bytes(block) == 0


@every_dtype
def test_weights_that_were_held_over_several_passes_go_when_one_of_them_fails(base_dtype):
    parts = drawn(base_dtype)
    block, batch = parts.blocks[1], tiny_batch(parts.spec)
    x_BTD = parts.embedding(batch)
    mask = parts.mask_form(batch["attention_mask"], x_BTD.dtype)
    with pytest.raises(RuntimeError, match="out of luck"), parts.on_demand[1].held():
        block(x_BTD, mask)
        assert held_bytes(block) > 0
        raise RuntimeError("out of luck")
    assert held_bytes(block) == 0
    # The next pass alone fills and empties it again.
    block(x_BTD, mask)
    assert held_bytes(block) == 0


@pytest.mark.parametrize("held", [True, False])
@every_dtype
def test_weights_that_come_only_in_part_do_not_stay(base_dtype, held, monkeypatch):
    """A disk that fails after some matrices left those of the TEB in memory until its next pass."""
    parts = drawn(base_dtype)
    block, batch = parts.blocks[0], tiny_batch(parts.spec)
    x_BTD = parts.embedding(batch)
    mask = parts.mask_form(batch["attention_mask"], x_BTD.dtype)

    def fail(block, weights):
        raise OSError("the file is gone")

    if base_dtype == "float32":
        names, read = [], type(parts.base).__getitem__

        def read_one(base, name):
            names.append(name)
            return fail(base, name) if len(names) == 3 else read(base, name)

        monkeypatch.setattr(type(parts.base), "__getitem__", read_one)
    else:
        monkeypatch.setattr(on_demand, "fill_low_bits", fail)
    with pytest.raises(OSError, match="the file is gone"):
        if held:
            with parts.on_demand[0].held():
                raise AssertionError("it has no weights")
        block(x_BTD, mask)
    assert held_bytes(block) == 0
