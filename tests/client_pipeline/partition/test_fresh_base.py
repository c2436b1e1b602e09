"""Fresh frozen weights: each part from a seed of its own, the same for whoever draws it, drawn as the library does."""

import json
import pickle
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_block, build_embedding, build_parts, merged
from client_pipeline.families.fresh_base import FreshBase, frozen_base
from client_pipeline.families.hugging_face import sized_config, spec_from_config
from client_pipeline.families.lora import adapt
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.weights.low_bits import low_bit_layers, packed
from flower_app.saved_model import load_model, save_model
from flower_app.tasks.base import Prepared
from flower_app.training.prepared_run import frozen_digest
from helpers.family_cases import STEP
from helpers.tiny_models import evaluation, tiny_batch, tiny_spec

LORA = LoraConfig(rank=2, alpha=6.0)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
every_family = pytest.mark.parametrize("family", FAMILIES)


def spec_of(family="llama", **change):
    return replace(tiny_spec(family, "causal-lm", dropout=0.0), lora=LORA, **change)


def prepared(spec, **more):
    return Prepared(spec=spec, tokenizer_json="{}", evaluator=None, cluster_sizes=(1,), **more)


def plain_over(base, spec):
    """The same model in memory: built as a whole, and given the drawn weights."""
    parts = build_parts(replace(spec, lora=None, base_dtype="float32"), seed=9)
    tied = {f"head.{name}" for name in parts.tied}
    head = {f"head.{name}": value for name, value in base.part("head.").items()}
    weights = dict(base) | {name: value for name, value in head.items() if name not in tied}
    parts.load({name: weights[name] for name, _ in parts.named_parameters()})
    return parts


@every_family
def test_parts_are_drawn_as_the_library_draws_a_whole_model(family):
    sizes = dict(width=128, num_heads=4, feed_forward=256, num_layers=4, dropout=0.0, max_length=64)
    groups = 0 if family == "gpt2" else 2
    config = sized_config(family, vocab_size=500, pad_id=0, bos_id=1, eos_id=2, key_value_heads=groups, **sizes)
    spec = spec_from_config(config, "causal-lm", server_layers=1)
    base = FreshBase(spec, seed=0)
    whole = {name: p.detach() for name, p in build_parts(spec, seed=0).all_parameters()}
    assert set(base) == {name for name in whole if not name.startswith("head.")}
    head = {f"head.{name}": value for name, value in base.part("head.").items()}
    for name, expected in whole.items():
        value = head[name] if name in head else base[name]
        assert value.shape == expected.shape
        if float(expected.std()) == 0:
            assert torch.equal(value, expected), name
        else:
            assert abs(float(value.std() / expected.std()) - 1) < 0.05 and abs(float(value.mean())) < 0.002, name
            assert not torch.equal(value, expected)


def test_a_part_is_the_same_everywhere_and_no_two_are_alike():
    spec = spec_of()
    base, again = FreshBase(spec, 3), frozen_base(FreshBase(spec, 3).to_json(), spec)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    blocks = [base.part(f"blocks.{index}.") for index in range(2)]
    name = "layer.mlp.up_proj.weight"
    assert not torch.equal(blocks[0][name], blocks[1][name])
    assert not torch.equal(blocks[0][name], FreshBase(spec, 4).part("blocks.0.")[name])
    for index, block in enumerate(blocks):
        assert torch.equal(block[name], again[f"blocks.{index}.{name}"])
    # Another part is drawn before it, or none: a part does not depend on the order.
    assert torch.equal(again.part("blocks.1.")[name], blocks[1][name])
    # Nobody's own draws are disturbed.
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_part_travels_as_its_seed_and_is_forgotten_when_it_is_released():
    part = FreshBase(spec_of(), 3).part("blocks.1.")
    value = next(iter(part.values()))
    sent = pickle.dumps(part)
    assert len(sent) < 2_000
    assert torch.equal(next(iter(pickle.loads(sent).values())), value)
    assert next(iter(part.values())).data_ptr() == value.data_ptr()
    part.release()
    assert next(iter(part.values())).data_ptr() != value.data_ptr()


@every_family
@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
def test_a_model_over_drawn_parts_learns_as_the_same_model_in_memory(family, base_dtype):
    spec = spec_of(family)
    over, batch = prepared(replace(spec, base_dtype=base_dtype)).build(seed=5), tiny_batch(spec)
    assert isinstance(over.base, FreshBase)
    in_memory = plain_over(over.base, spec)
    if base_dtype == "int8":
        for index, block in enumerate(over.blocks):
            for name, layer in low_bit_layers(block):
                weight = in_memory.blocks[index].get_parameter(f"{name}.weight")
                weight.data.copy_(layer.rounded(weight.data))
    in_memory = adapt(in_memory, LORA, seed=5)
    expected, actual = (whole_step(parts, STEP, batch, 3).gradients for parts in (in_memory, over))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-4, atol=1e-6), name


def test_nobody_of_the_server_holds_tebs_or_an_embedding_that_the_head_does_not_read():
    untied = prepared(spec_of()).build(seed=5)
    frozen = [p for part in (untied.embedding, untied.blocks) for p in part.parameters() if not p.requires_grad]
    assert {p.device.type for p in frozen} == {"meta"}
    with torch.no_grad():
        untied.encode(tiny_batch(untied.spec))
    assert {p.device.type for p in untied.embedding.parameters()} == {"meta"}
    tied = prepared(spec_of("gpt2")).build(seed=5)
    assert tied.embedding.wte.weight.data_ptr() == tied.head.lm_head.weight.data_ptr()


def test_a_control_unit_and_a_device_draw_what_the_server_evaluates_with():
    spec = spec_of(base_dtype="nf4")
    server = prepared(spec).build(seed=5)
    base = frozen_base(server.base.to_json(), spec)
    embedding, batch = build_embedding(spec, base.part("embedding.")), tiny_batch(spec)
    stage = Stage(spec, OptimizerConfig(name="sgd"))
    for index in range(len(server.blocks)):
        prefix = f"blocks.{index}."
        trained = {n.removeprefix(prefix): v for n, v in server.weights().items() if n.startswith(prefix)}
        stage.place(index, pickle.loads(pickle.dumps(MovedBlock(trained, {}, base.part(prefix)))))
    with torch.no_grad():
        x_BTD = embedding(batch)
        actual = stage.forward(STEP, 0, x_BTD, batch["attention_mask"])
        assert torch.equal(actual, evaluation(server).encode(batch))
    # What goes to another device is the seed.
    moved = stage.take(1)
    assert len(pickle.dumps(moved.frozen)) < 2_000
    assert moved.nbytes == sum(value.nbytes for value in moved.weights.values())


def test_a_block_in_few_bits_has_the_drawn_matrices():
    spec = spec_of(base_dtype="int8")
    part = FreshBase(spec, 0).part("blocks.0.")
    for name, layer in low_bit_layers(build_block(spec, 0, part)):
        for value, expected in zip(layer.packed_matrix, packed(part[f"{name}.weight"], "int8"), strict=True):
            assert torch.equal(value, expected)


def test_a_saved_model_names_its_seed_and_loads_as_it_was(tmp_path):
    spec = spec_of(base_dtype="int8")
    parts = prepared(spec).build(seed=5)
    folder = save_model(tmp_path, spec, parts.weights(), "{}", {}, 1, parts.base)
    assert json.loads((folder / "base.json").read_text()) == {"seed-of-fresh-weights": 5}
    loaded, batch = load_model(tmp_path).parts, tiny_batch(spec)
    with torch.no_grad():
        assert torch.equal(evaluation(loaded).logits(batch), evaluation(parts).logits(batch))


def test_a_model_over_drawn_parts_merges_into_a_plain_one():
    spec = spec_of()
    parts = prepared(spec).build(seed=5)
    generator, batch = torch.Generator().manual_seed(1), tiny_batch(spec)
    for name, parameter in parts.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.05, generator=generator)
    plain = merged(parts)
    with torch.no_grad():
        actual, expected = (evaluation(model).logits(batch) for model in (plain, parts))
    assert plain.base is None and torch.allclose(actual, expected, atol=1e-5)


def test_a_run_goes_on_with_the_seed_that_it_began_with():
    spec = spec_of()
    digest = frozen_digest(FreshBase(spec, 1), None, "")
    assert frozen_digest(FreshBase(spec, 1), {"frozen": digest}, "") == digest
    with pytest.raises(ValueError, match="resume: the frozen weights are not those that the run began with"):
        frozen_digest(FreshBase(spec, 2), {"frozen": digest}, "")


@pytest.mark.parametrize(("family", "head", "lora"), [("llama", "causal-lm", None), ("bert", "masked-lm", LORA)])
def test_what_is_trained_whole_and_other_families_are_one_draw_as_ever(family, head, lora):
    spec = replace(tiny_spec(family, head, dropout=0.0), lora=lora)
    parts = prepared(spec).build(seed=5)
    assert parts.base is None
    expected = dict(build_parts(replace(spec, lora=None), seed=5).all_parameters())
    for name, parameter in parts.all_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, expected[name.replace(".base_layer.", ".")]), name


def test_a_text_that_is_no_seed_is_refused():
    spec = spec_of()
    for seed in ("5", None, 1.5, True):
        with pytest.raises(ValueError, match="expected the seed of fresh weights of a decoder-only family"):
            frozen_base(json.dumps({"seed-of-fresh-weights": seed}), spec)
    with pytest.raises(ValueError, match="found 5 of bert"):
        frozen_base(FreshBase(spec, 5).to_json(), tiny_spec("bert", "masked-lm"))
    with pytest.raises(ValueError, match="frozen weights: expected their files and places"):
        frozen_base("{}", spec)
    with pytest.raises(KeyError):
        FreshBase(spec, 5)["nothing"]
