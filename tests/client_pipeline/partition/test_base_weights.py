"""Frozen weights in files: the same model as in memory, part by part, and never a file that is not the server's."""

import json
import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_block, build_embedding, build_over, build_parts, merged
from client_pipeline.families.lora import adapt
from client_pipeline.families.pretrained import load_pretrained, load_pretrained_weights
from client_pipeline.partition.parts import part_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.weights import base_weights
from client_pipeline.weights.base_weights import BaseWeights
from client_pipeline.weights.weight_files import MappedFile
from helpers.family_cases import STEP, every_case
from helpers.tiny_models import NUM_BLOCKS, evaluation, library_config, tiny_batch, tiny_spec

LORA = LoraConfig(rank=2, alpha=6.0)
SGD = OptimizerConfig(name="sgd")


def saved(folder, name="llama", head="causal-lm", dtype=torch.float32, **options):
    """Save a tiny model of the library; returns its source and its server's blocks."""
    spec = tiny_spec(name, head, dropout=0.0)
    build_parts(spec, seed=3).reference.to(dtype).save_pretrained(folder, **options)
    return str(folder), spec.config.get("server_layers", 0)


def model_over(folder, name="llama", head="causal-lm", **options):
    source, server_layers = saved(folder, name, head, **options)
    spec, weights = load_pretrained_weights(source, head, server_layers=server_layers)
    spec = replace(spec, lora=LORA)
    return spec, weights, build_over(spec, weights.base, part_weights(weights, "head"), seed=5)


@pytest.mark.slow
@every_case
def test_a_model_over_its_files_is_the_one_that_was_loaded_into_memory(name, head, tmp_path):
    source, server_layers = saved(tmp_path, name, head)
    expected = load_pretrained(source, head, server_layers=server_layers)
    spec, weights = load_pretrained_weights(source, head, server_layers=server_layers)
    assert spec == expected.spec
    assert {n: v.tolist() for n, v in weights.items()} == {n: v.tolist() for n, v in expected.weights().items()}
    # Positions that are computed, and not trained, are in no file.
    assert (weights.base is None) == any(not p.requires_grad for _, p in expected.all_parameters())
    if weights.base is not None:
        spec, batch = replace(spec, lora=LORA), tiny_batch(spec)
        over = build_over(spec, weights.base, part_weights(weights, "head"), seed=5)
        in_memory = adapt(expected, LORA, seed=5)
        weights_in_memory = in_memory.weights()
        assert all(torch.equal(value, weights_in_memory[name]) for name, value in over.weights().items())
        with torch.no_grad():
            assert torch.equal(evaluation(over).logits(batch), evaluation(in_memory).logits(batch))


def test_a_new_head_is_drawn_as_for_a_model_in_memory(tmp_path):
    from transformers import AutoModel

    AutoModel.from_config(library_config("electra")).save_pretrained(tmp_path)
    for seed in (1, 2):
        expected = load_pretrained(str(tmp_path), "token-classification", 3, seed).weights()
        _, weights = load_pretrained_weights(str(tmp_path), "token-classification", 3, seed)
        assert weights.base is not None and weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_model_in_several_files_is_the_same_as_in_one(tmp_path):
    _, _, whole = model_over(tmp_path / "one")
    spec, weights, sharded = model_over(tmp_path / "many", max_shard_size="8KB")
    assert len(weights.base.files) > 3
    batch = tiny_batch(spec)
    with torch.no_grad():
        assert torch.equal(evaluation(sharded).logits(batch), evaluation(whole).logits(batch))


def test_weights_of_16_bits_are_used_as_their_values_in_float32(tmp_path):
    source, server_layers = saved(tmp_path, dtype=torch.bfloat16)
    spec, weights, over = model_over(tmp_path, dtype=torch.bfloat16)
    in_memory = adapt(load_pretrained(source, "causal-lm", server_layers=server_layers), LORA, seed=5)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    batch = tiny_batch(spec)
    with torch.no_grad():
        assert torch.equal(evaluation(over).logits(batch), evaluation(in_memory).logits(batch))


def test_parts_of_one_file_share_its_pages_and_have_the_weights_while_they_run_alone(tmp_path):
    spec, weights, parts = model_over(tmp_path)
    base = weights.base
    blocks = [build_block(spec, 1, base.part("blocks.1.")) for _ in range(2)]
    frozen = [{p.data_ptr() for p in block.parameters() if not p.requires_grad} for block in blocks]
    assert frozen[0] == frozen[1] and len(frozen[0]) == 9
    embedding = build_embedding(spec, base.part("embedding."))
    assert embedding.embed_tokens.weight.data_ptr() == base["embedding.embed_tokens.weight"].data_ptr()
    assert {p.device.type for p in parts.blocks.parameters() if not p.requires_grad} == {"meta"}
    with torch.no_grad():
        parts.encode(tiny_batch(spec))
    assert {p.device.type for p in parts.blocks.parameters() if not p.requires_grad} == {"meta"}


def test_a_model_over_its_files_merges_into_the_one_that_is_in_memory(tmp_path):
    _, _, over = model_over(tmp_path)
    in_memory = adapt(load_pretrained(str(tmp_path), "causal-lm", server_layers=2), LORA, seed=5)
    weights_over_files = merged(over).weights()
    for name, value in merged(in_memory).weights().items():
        assert torch.equal(weights_over_files[name], value), name


def test_a_stage_over_files_learns_as_one_whose_weights_were_sent_and_gives_places_away_not_bytes(tmp_path):
    spec, weights, over = model_over(tmp_path)
    in_memory = adapt(load_pretrained(str(tmp_path), "causal-lm", server_layers=2), LORA, seed=5)
    sent, mapped, other = Stage(spec, SGD), Stage(spec, SGD), Stage(spec, SGD)
    frozen = {n.removeprefix("blocks.2."): v for n, v in in_memory.frozen_weights().items() if n.startswith("blocks.2")}
    own = {n.removeprefix("blocks.2."): v for n, v in over.weights().items() if n.startswith("blocks.2")}
    sent.place(2, MovedBlock(own, {}, frozen))
    mapped.place(2, MovedBlock(own, {}, weights.base.part("blocks.2.")))
    gradients = []
    for stage in (sent, mapped):
        x_BTD, mask_BT = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1)), torch.ones(3, 6).bool()
        stage.forward(STEP, 0, x_BTD, mask_BT)
        stage.backward(STEP, 0, torch.ones_like(x_BTD), mask_BT)
        gradients.append(stage.gradients()[2])
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())
    moved = pickle.loads(pickle.dumps(mapped.take(2)))
    assert moved.nbytes == sum(value.nbytes for value in own.values())
    assert len(pickle.dumps(moved.frozen)) < 2_000
    other.place(2, moved)
    assert all(torch.equal(p, sent.blocks[2].frozen[name]) for name, p in other.blocks[2].frozen.items())


def test_one_step_over_files_has_the_gradients_of_one_in_memory(tmp_path):
    spec, _, over = model_over(tmp_path)
    batch = tiny_batch(spec)
    in_memory = adapt(load_pretrained(str(tmp_path), "causal-lm", server_layers=2), LORA, seed=5)
    expected, found = (whole_step(parts, STEP, batch, 3).gradients for parts in (in_memory, over))
    assert len(found) == len(expected) > NUM_BLOCKS
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_what_travels_is_names_and_digests(tmp_path):
    spec, weights, _ = model_over(tmp_path)
    base = BaseWeights.from_json(weights.base.to_json()).check()
    assert dict(base.places) == dict(weights.base.places) and base.files == weights.base.files
    assert len(weights.base.to_json()) < 100 * len(weights.base)
    for name in weights.base:
        assert torch.equal(base[name], weights[name])


def test_a_machine_without_the_servers_files_is_refused_by_folder_digest_and_remedy(tmp_path):
    _, weights, _ = model_over(tmp_path / "model")
    text, digest = weights.base.to_json(), weights.base.files[0].sha256[:14]
    with pytest.raises(ValueError, match=rf"elsewhere is no folder.*SHA-256 {digest}.*collapipe join --model FOLDER"):
        BaseWeights.from_json(text, str(tmp_path / "elsewhere")).check()
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    BaseWeights.from_json(text, str(tmp_path / "copy")).check()
    file = tmp_path / "copy" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"copy/model.safetensors on .*expected .*SHA-256 {digest}"):
        BaseWeights.from_json(text, str(tmp_path / "copy")).check()
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match="of other bytes; expected model.safetensors"):
        BaseWeights.from_json(text, str(tmp_path / "copy")).check()
    # What was compared once and has changed since is compared again.
    shutil.copy(file, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="model/model.safetensors on"):
        weights.base.check()


def test_a_machine_that_has_the_hub_ids_files_in_its_cache_has_them_and_asks_no_network(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(base_weights, "weight_folder", None)
    _, weights, _ = model_over(tmp_path / "model")
    elsewhere = replace(weights.base, source="organisation/name", checked=())
    assert not elsewhere.files_are_there
    kept = tmp_path / "hub" / "models--organisation--name"
    shutil.copytree(tmp_path / "model", kept / "snapshots" / "0123")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    assert elsewhere.files_are_there and elsewhere.folder == kept / "snapshots" / "0123"
    assert elsewhere.check().checked
    # Neither a path nor a misspelt one is an id.
    assert not replace(elsewhere, source=str(tmp_path / "none")).files_are_there


def test_files_of_another_folder_cannot_be_named(tmp_path):
    _, weights, _ = model_over(tmp_path)
    raw = json.loads(weights.base.to_json())
    for name in ("../model.safetensors", "/etc/passwd", "model.bin", ""):
        raw["files"][0]["name"] = name
        with pytest.raises(ValueError, match="expected the plain name of a safetensors file"):
            BaseWeights.from_json(json.dumps(raw))
    for text in ("", "[]", "{}", json.dumps({**raw, "places": {"a": [7, "b"]}})):
        with pytest.raises(ValueError, match="frozen weights: expected their files and places"):
            BaseWeights.from_json(text)


def test_a_damaged_file_is_named(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="expected a tensor 'nothing'; the file is of another model"):
        MappedFile(file).tensor("nothing")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"model.safetensors: expected a safetensors file"):
        MappedFile(file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(ValueError, match="expected names of safetensors files of its folder"):
        load_pretrained_weights(str(tmp_path), "causal-lm")
