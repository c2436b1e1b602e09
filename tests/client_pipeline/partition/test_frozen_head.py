"""``lora.head = "adapters"``: the server's blocks have adapters, and nothing else of its part is trained."""

import json
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_head, build_over, build_parts, merged
from client_pipeline.families.lora import adapt
from client_pipeline.families.pretrained import load_pretrained, load_pretrained_weights
from client_pipeline.partition.parts import frozen_parameters, own_parameters, part_weights
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.weights.base_weights import BaseWeights
from flower_app.saved_model import load_model, save_model
from flower_app.tasks.base import Prepared
from helpers.family_cases import STEP
from helpers.tiny_models import evaluation, tiny_batch, tiny_spec

LORA = LoraConfig(rank=2, alpha=6.0, head="adapters")
FAMILIES = ("llama", "qwen2", "gpt2")
every_family = pytest.mark.parametrize("family", FAMILIES)


def spec_of(family, **change):
    return replace(tiny_spec(family, "causal-lm", dropout=0.0), lora=LORA, **change)


def stirred(parts):
    """Give the factors B values, as training does."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in parts.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.05, generator=generator)
    return parts


def over_files(family, folder):
    spec = tiny_spec(family, "causal-lm", dropout=0.0)
    build_parts(spec, seed=3).reference.save_pretrained(folder)
    read, weights = load_pretrained_weights(str(folder), "causal-lm", server_layers=spec.config["server_layers"])
    spec = replace(read, lora=LORA)
    return Prepared(spec=spec, tokenizer_json="{}", evaluator=None, cluster_sizes=(1,), weights=weights).build(5)


def drawn(family, **change):
    spec = spec_of(family, **change)
    return Prepared(spec=spec, tokenizer_json="{}", evaluator=None, cluster_sizes=(1,)).build(5)


@every_family
def test_adapters_alone_are_trained_in_the_head(family):
    head = drawn(family).head
    trained = own_parameters(head)
    assert trained and all(".lora_" in name and name.startswith("blocks.") for name in trained)
    assert {"lm_head.weight"} <= frozen_parameters(head).keys()
    # A block of the server has the adapters that a TEB has.
    parts = drawn(family)
    of_teb = {name for name, p in parts.blocks[0].named_parameters() if p.requires_grad}
    assert {name.partition("blocks.0.")[2] for name in trained if name.startswith("blocks.0.")} == of_teb
    with torch.device("meta"):
        assert own_parameters(build_head(parts.spec)).keys() == trained.keys()


@every_family
def test_a_frozen_head_over_files_is_a_view_of_them_and_learns_as_in_memory(family, tmp_path):
    over = over_files(family, tmp_path)
    assert isinstance(over.base, BaseWeights)
    name = "norm.weight" if family != "gpt2" else "norm.bias"
    assert over.head.get_parameter(name).data_ptr() == over.base[f"head.{name}"].data_ptr()
    server_layers = over.spec.config["server_layers"]
    in_memory = adapt(load_pretrained(str(tmp_path), "causal-lm", server_layers=server_layers), LORA, seed=5)
    batch = tiny_batch(over.spec)
    expected, actual = (whole_step(stirred(parts), STEP, batch, 3).gradients for parts in (in_memory, over))
    assert actual.keys() == expected.keys() and any(name.startswith("head.") for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("files", [True, False])
@every_family
def test_a_saved_model_has_the_adapters_and_names_the_rest(family, files, tmp_path):
    parts = stirred(over_files(family, tmp_path / "base") if files else drawn(family, base_dtype="int8"))
    folder = save_model(tmp_path, parts.spec, parts.weights(), "{}", {}, 1, parts.base)
    assert folder.joinpath("model.safetensors").stat().st_size < 40_000
    loaded, batch = load_model(tmp_path).parts, tiny_batch(parts.spec)
    with torch.no_grad():
        assert torch.equal(evaluation(loaded).logits(batch), evaluation(parts).logits(batch))


@pytest.mark.parametrize("files", [True, False])
@every_family
def test_adapters_of_the_head_are_merged_with_the_others(family, files, tmp_path):
    parts = stirred(over_files(family, tmp_path) if files else drawn(family))
    plain, batch = merged(parts), tiny_batch(parts.spec)
    name = next(name for name in own_parameters(parts.head) if ".lora_B." in name)
    with torch.no_grad():
        expected = evaluation(parts).logits(batch)
        torch.testing.assert_close(evaluation(plain).logits(batch), expected, rtol=1e-4, atol=1e-5)
        parts.head.get_parameter(name).zero_()
        assert not torch.allclose(evaluation(parts).logits(batch), expected, atol=1e-5)


def test_what_goes_to_the_nodes_names_the_heads_places_only_where_it_is_frozen(tmp_path):
    over = over_files("llama", tmp_path)
    assert any(name.startswith("head.") for name in json.loads(over.base.to_json())["places"])
    _, weights = load_pretrained_weights(str(tmp_path), "causal-lm", server_layers=2)
    trained = build_over(
        replace(over.spec, lora=replace(LORA, head="whole")), weights.base, part_weights(weights, "head"), 5
    )
    assert not any(name.startswith("head.") for name in json.loads(trained.base.to_json())["places"])


def test_a_head_without_blocks_has_no_place_for_adapters():
    bert = replace(tiny_spec("bert", "masked-lm"), lora=LORA)
    with pytest.raises(ValueError, match="lora.head: .* found none; set model.decoder-layers to 1"):
        build_parts(bert, seed=0)
    with pytest.raises(ValueError, match="lora.head: expected one of whole, adapters, found 'none'"):
        LoraConfig(head="none")


def test_a_specification_says_it_only_where_it_is_so():
    assert '"head": "adapters"' in spec_of("llama").to_json().partition('"lora"')[2]
    assert ModelSpec.from_json(spec_of("llama").to_json()) == spec_of("llama")
    whole = replace(spec_of("llama"), lora=replace(LORA, head="whole"))
    assert '"head"' not in json.dumps(json.loads(whole.to_json())["lora"])
    assert ModelSpec.from_json(whole.to_json()) == whole
