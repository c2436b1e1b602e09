"""Parts of a saved model, each built alone, are those of the whole that was saved."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts, merged
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.serving.saved_parts import answering_parts
from flower_app.saved_model import load_model, load_plain_model, read_model, save_model
from flower_app.tasks.base import Prepared
from helpers.decoder_only import small_spec

LORA = LoraConfig(rank=2, alpha=6.0)
KINDS = {"whole": None, "adapters": LORA, "adapters in the head": replace(LORA, head="adapters")}


def saved(folder, spec, lora, base, base_dtype="float32"):
    """Save a model as a training leaves it, whose frozen weights are in files, drawn from a seed, or in memory."""
    weights = {}
    if base == "files":
        build_parts(spec, seed=3).reference.save_pretrained(folder / "base")
        spec, weights = load_pretrained_weights(str(folder / "base"), spec.head, server_layers=1)
    spec = replace(spec, lora=lora, base_dtype=base_dtype)
    if base == "memory":
        parts = build_parts(spec, seed=5)
    else:
        prepared = Prepared(spec=spec, tokenizer_json="", evaluator=None, cluster_sizes=(1,), weights=weights)
        parts = prepared.build(seed=5)
    with torch.no_grad():
        for _, value in parts.named_parameters():
            value.add_(0.1 * torch.randn(value.shape))
    frozen = parts.frozen_weights() if parts.base is None else {}
    save_model(folder, spec, {**parts.weights(), **frozen}, "", {}, base=parts.base)
    assert (parts.base is not None) == (base != "memory" and lora is not None)


@pytest.mark.parametrize("base", ["files", "seed", "memory"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parts_alone_are_those_of_the_merged_whole(tmp_path, family, kind, base):
    saved(tmp_path, small_spec(family), KINDS[kind], base)
    if base == "seed" and KINDS[kind] is not None:
        # An embedding that is drawn has its weights only while it runs; those of the plain model are read.
        whole = load_plain_model(tmp_path).parts
    else:
        whole = merged(load_model(tmp_path).parts)
    stored = read_model(tmp_path)
    model = answering_parts(stored.spec, stored.weights, stored.base)
    assert not model.parts.embedding.training and not model.parts.head.training
    assert model.spec.lora is None and not model.frozen
    for part, of_whole in ((model.parts.embedding, whole.embedding), (model.parts.head, whole.head)):
        expected = dict(of_whole.named_parameters())
        assert expected.keys() == dict(part.named_parameters()).keys()
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=0, atol=1e-6)
    assert all(parameter.is_meta or not parameter.ndim > 1 for parameter in model.parts.blocks.parameters())
    for index, block in enumerate(whole.blocks):
        weights = dict(model.weights[index])
        for name, parameter in block.named_parameters():
            torch.testing.assert_close(weights.pop(name), parameter.detach(), rtol=0, atol=1e-6)
        assert not weights


def test_layers_in_few_bits_stay_so_beside_their_adapters(tmp_path):
    saved(tmp_path, small_spec("llama"), LORA, "files", "nf4")
    stored = read_model(tmp_path)
    model = answering_parts(stored.spec, stored.weights, stored.base)
    assert model.spec == stored.spec and model.spec.low_bits and set(model.frozen) == set(stored.base)
    assert all("lora_" in name for index in model.weights for name in model.weights[index])


def test_a_tied_matrix_is_held_once(tmp_path):
    saved(tmp_path, small_spec("gpt2"), None, "memory")
    stored = read_model(tmp_path)
    parts = answering_parts(stored.spec, stored.weights, stored.base).parts
    pointers = {parameter.data_ptr() for parameter in parts.embedding.parameters()}
    assert parts.head.lm_head.weight.data_ptr() in pointers
