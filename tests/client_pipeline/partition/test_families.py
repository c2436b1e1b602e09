"""Every family, cut and joined, is the library's model: outputs, loss and every gradient."""

import json
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts, dropouts, head_of, read_library_config
from client_pipeline.families.hugging_face import auto_model, spec_from_config
from client_pipeline.families.pretrained import load_pretrained
from client_pipeline.families.registry import families, family_named, library_families
from client_pipeline.partition.parts import (
    block_weights,
    join_weights,
    load_parameters,
    own_parameters,
    target_weight,
    targets,
)
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.runtime.control_unit.verification import random_batch
from client_pipeline.runtime.stage.whole import whole_step
from client_pipeline.system import costs
from client_pipeline.system.costs import model_costs
from helpers.family_cases import CUTS, STEP, assert_all_close, every_case, split_step
from helpers.tiny_models import (
    CONFIGS,
    FIRST_CASES,
    NUM_BLOCKS,
    NUM_LABELS,
    VOCABULARY,
    evaluation,
    library_config,
    tiny_batch,
    tiny_spec,
)

every_family = pytest.mark.parametrize(("name", "head"), FIRST_CASES)


def reference_step(parts, batch):
    """Logits, loss and gradients of the library's own model, by global name."""
    inputs = {**batch, "attention_mask": batch["attention_mask"].long()}
    outputs = parts.reference.train()(**inputs)
    outputs.loss.backward()
    found = {name: parameter.grad for name, parameter in parts.named_parameters()}
    return outputs.logits.detach(), float(outputs.loss.detach()), found


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@every_case
def test_a_cut_model_is_the_librarys_model(name, head, padded):
    spec = tiny_spec(name, head, dropout=0.0)
    parts = build_parts(spec, seed=1)
    batch = tiny_batch(spec, padded=padded)
    logits, loss, expected = reference_step(parts, batch)
    # T5 begins with large weights, so with large scores.
    scale = max(1.0, float(logits.abs().max()))
    torch.testing.assert_close(parts.logits(batch).detach(), logits, rtol=1e-4, atol=1e-6 * scale)
    weights = parts.weights()
    assert expected.keys() == weights.keys()
    expected = {name: torch.zeros_like(weights[name]) if g is None else g for name, g in expected.items()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for m, cut in zip((1, 3, 3, 7), CUTS, strict=True):
        split_loss, gradients = split_step(spec, weights, batch, cut, m)
        assert split_loss == pytest.approx(loss, rel=1e-5)
        assert_all_close(gradients, expected, rtol=1e-3, atol=1e-6 * max(1.0, largest))


@every_case
def test_every_parameter_of_the_library_is_in_one_part(name, head):
    spec = tiny_spec(name, head)
    parts = build_parts(spec, seed=1)
    of_library = {id(p) for p in parts.reference.parameters() if p.requires_grad}
    named = dict(parts.named_parameters())
    if spec.head == "seq2seq" and not parts.tied and hasattr(parts.reference.model, "shared"):
        of_library.discard(id(parts.reference.model.shared.weight))  # untied, the library has it without using it
    assert {id(p) for p in named.values()} == of_library
    assert len(named) == len(of_library)
    family = family_named(spec.family)
    alone = join_weights(
        own_parameters(family.build_embedding(spec)),
        {i: own_parameters(family.build_block(spec, i)) for i in range(family.num_blocks(spec))},
        own_parameters(family.build_head(spec)),
    )
    assert {key: p.shape for key, p in alone.items()} == {key: p.shape for key, p in named.items()}
    assert len(parts.blocks) == family.num_blocks(spec) == NUM_BLOCKS
    assert family.width(spec) == parts.encode(tiny_batch(spec)).shape[-1]


@every_case
def test_a_tied_matrix_is_the_embeddings(name, head):
    spec = tiny_spec(name, head)
    parts, family = build_parts(spec, seed=1), family_named(spec.family)
    assert parts.tied == family.tied(spec)
    for own, of_embedding in parts.tied.items():
        assert parts.head.get_parameter(own) is parts.embedding.get_parameter(of_embedding)
        assert f"head.{own}" not in parts.weights()


@every_case
def test_a_block_built_alone_is_the_block_of_the_whole(name, head):
    spec = tiny_spec(name, head)
    parts, family = build_parts(spec, seed=1), family_named(spec.family)
    mask_BT = tiny_batch(spec)["attention_mask"]
    size, length = mask_BT.shape
    shape = (size + family.carried_examples(spec), length, family.width(spec))
    x_BTD = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    weights = parts.weights()
    for index, block in enumerate(parts.blocks.eval()):
        alone = family.build_block(spec, index).eval()
        load_parameters(own_parameters(alone), block_weights(weights, index), "block")
        for mask in (mask_BT, torch.ones_like(mask_BT)):
            form = family.mask_form(mask, x_BTD.dtype)
            assert torch.equal(alone(x_BTD, form), block(x_BTD, form))
        torch.testing.assert_close(alone(x_BTD, None), alone(x_BTD, form))


def test_a_part_of_a_model_of_1_1_billion_parameters_is_built_without_memory_for_the_others():
    sizes = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, vocab_size=32_000)
    heads = dict(num_attention_heads=32, num_key_value_heads=4, pad_token_id=None)
    spec = spec_from_config(library_config("llama", **sizes, **heads), "causal-lm")
    family, num_parameters = family_named("llama"), 0
    for name in ("embedding", *(f"blocks.{index}" for index in range(22)), "head"):
        parameters = list(family.unfilled_part(spec, name).parameters())
        num_parameters += sum(p.numel() for p in parameters)
        assert {p.device.type for p in parameters if p.dim() > 1} == {"meta"}
    assert num_parameters == 1_100_048_384


@every_family
def test_what_a_model_drops_is_found_in_its_specification(name, head):
    for rate in (0.0, 0.5):
        spec = tiny_spec(name, head, dropout=rate)
        batch, losses = tiny_batch(spec), []
        for seed in (0, 1):
            parts = build_parts(spec, seed=1)
            for part in (parts.embedding, parts.blocks, parts.head):
                part.train()
            losses.append(whole_step(parts, replace(STEP, seed=seed), batch, 1).loss_sum)
        assert bool(dropouts(spec)) == (losses[0] != losses[1]), (dropouts(spec), losses)
    adapted = replace(tiny_spec(name, head, dropout=0.0), lora=LoraConfig(dropout=0.25))
    assert dropouts(adapted) == {"lora.dropout": 0.25}


@every_case
def test_a_specification_crosses_the_network_as_json_and_has_random_batches(name, head):
    spec = tiny_spec(name, head)
    again = ModelSpec.from_json(spec.to_json())
    assert again == spec
    weights = build_parts(spec, 3).weights()
    for one, other in zip(weights.items(), build_parts(again, 3).weights().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    assert torch.isfinite(build_parts(spec, seed=0).loss_sum(random_batch(spec, 3, 8)))


@every_case
def test_the_costs_of_a_block_can_be_counted(name, head, monkeypatch):
    spec = tiny_spec(name, head)
    family = family_named(spec.family)
    counted = costs.all_teb_costs(spec, 8)
    monkeypatch.setattr(costs, "all_teb_costs", lambda spec, length, **passes: counted)
    one, two = (model_costs(spec, sequence_length=8, batch_size=2, local_steps=n) for n in (1, 2))
    assert 0 < one.o_f < one.o_b
    # A tied matrix goes up anew with every step but the first.
    embedding = family.build_embedding(spec)
    tied = sum(8 * 4 * embedding.get_parameter(own).numel() for own in family.tied(spec).values())
    labels = 1 if spec.head == "sequence-classification" else 8
    activations = 2 * 8 * (8 * (4 * family.width(spec) + 1) + 8 * labels)
    assert two.upload_time_bits - one.upload_time_bits == activations + tied


def test_padding_far_from_every_real_token_stays_finite_under_local_attention():
    # A padded token of ModernBERT's local layers may see no real token at all.
    spec = tiny_spec("modernbert", "token-classification", dropout=0.0)
    batch = tiny_batch(spec, size=2, length=12)
    batch["attention_mask"][1, 2:] = False
    batch["labels"][1, 2:] = -100
    _, found = split_step(spec, build_parts(spec, seed=1).weights(), batch, (2, 3), 1)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


# Loading.


def save(folder, family, head="sequence-classification", num_labels=NUM_LABELS):
    torch.manual_seed(0)
    model = auto_model(head).from_config(library_config(family, num_labels=num_labels))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.slow
@every_case
def test_a_checkpoint_of_any_family_is_loaded(tmp_path, name, head):
    spec = tiny_spec(name, head)
    model = build_parts(spec, seed=2).reference.eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    assert head_of(read_library_config(str(tmp_path))) == head
    server_layers = spec.config.get("server_layers", 0)
    parts = evaluation(load_pretrained(str(tmp_path), head, server_layers=server_layers))
    assert (parts.spec.family, parts.spec.head, len(parts.blocks)) == (spec.family, head, NUM_BLOCKS)
    assert {p.dtype for _, p in parts.named_parameters()} == {torch.float32}
    batch = tiny_batch(parts.spec)
    inputs = {key: value for key, value in batch.items() if key != "labels" or head == "seq2seq"}
    with torch.no_grad():
        expected = model(**{**inputs, "attention_mask": batch["attention_mask"].long()}).logits
        found = parts.logits(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * max(1.0, float(expected.abs().max())))
    again = build_parts(parts.spec, seed=5)
    again.load(parts.weights())
    torch.testing.assert_close(evaluation(again).logits(batch), expected, rtol=1e-4, atol=1e-5)


def test_a_new_head_depends_on_the_seed_alone(tmp_path):
    from transformers import AutoModel

    torch.manual_seed(0)
    AutoModel.from_config(library_config("electra")).save_pretrained(tmp_path)
    heads = [load_pretrained(str(tmp_path), "token-classification", 3, seed).head.classifier for seed in (1, 1, 2)]
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].out_features == 3


def test_an_unknown_architecture_says_what_there_is_and_where_to_add_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fnet"}))
    with pytest.raises(
        ValueError, match="model type 'fnet' is not supported; expected one of bart, bert, blenderbot, camem"
    ):
        read_library_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"write a LibraryFamily in client_pipeline/families/fnet.py and name it in"):
        load_pretrained(str(tmp_path), "sequence-classification", 2)
    with pytest.raises(ValueError, match=r"'my-model' is not supported.*client_pipeline/families/my_model.py"):
        family_named("my-model")
    assert set(families()) == {"transformer", *library_families()} == {"transformer", *CONFIGS}


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [("albert", "bert"), ("mbart", "bart"), ("umt5", "mt5"), ("xlm-roberta-xl", "xlm-roberta")],
)
def test_a_relative_of_a_family_is_refused_with_the_nearest(tmp_path, model_type, nearest):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(
        ValueError, match=f"'{model_type}' is not supported: .*; the nearest that can be split is '{nearest}'"
    ):
        read_library_config(str(tmp_path))


def test_a_pickled_checkpoint_is_refused(tmp_path):
    model = save(tmp_path, "roberta")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="found pytorch_model.bin: pickled weights are never read"):
        load_pretrained(str(tmp_path), "sequence-classification", NUM_LABELS)


def test_half_a_checkpoint_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path, "distilbert")
    kept = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "layer.3" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the weights lack 16 of the model's tensors"):
        load_pretrained(str(tmp_path), "sequence-classification", NUM_LABELS)


def test_a_head_of_other_classes_is_refused(tmp_path):
    save(tmp_path, "bert", num_labels=3)
    with pytest.raises(ValueError, match=r"classifier.bias has the shape \[3\], expected \[5\]"):
        load_pretrained(str(tmp_path), "sequence-classification", 5)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("deberta-v2", {"norm_rel_ebd": "layer_norm"}, "norm_rel_ebd: expected none"),
        ("bert", {"is_decoder": True}, "is_decoder: expected false"),
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop: expected 0, found 0.1"),
    ],
)
def test_what_cannot_be_cut_is_named(family, more, message):
    spec = spec_from_config(library_config(family, **more), family_named(family).HEADS[0])
    for build in (lambda: build_parts(spec, 0), lambda: family_named(family).build_block(spec, 0)):
        with pytest.raises(ValueError, match=message):
            build()


def test_other_heads_and_regression_are_refused():
    with pytest.raises(
        ValueError, match="has the heads sequence-classification, token-classification, masked-lm, found 'seq2seq'"
    ):
        build_parts(tiny_spec("electra", "seq2seq"), 0)
    with pytest.raises(ValueError, match="num_labels: expected at least 2 classes, found 1"):
        build_parts(spec_from_config(library_config("bert", num_labels=1), "sequence-classification"), 0)
    for family in ("bart", "t5", "gpt2", "llama"):
        spec = ModelSpec(family=family, head="masked-lm", config=CONFIGS[family])
        with pytest.raises(ValueError, match=f"model.family {family} has the heads"):
            build_parts(spec, seed=0)


# What one family alone has.


def test_a_trained_bias_of_the_logits_is_a_parameter():
    # The library has it as a buffer, which no weights of a round would bring to where the decoder is trained.
    spec, family = tiny_spec("marian", dropout=0.0), family_named("marian")
    model = build_parts(spec, seed=1).reference.eval()
    assert family.spec_from_model(model, "seq2seq").config["trained_logits_bias"] is False
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="trained_logits_bias: expected True"):
        family.split(model, spec)
    parts, batch = family.split(model, family.spec_from_model(model, "seq2seq")), tiny_batch(spec)
    assert torch.equal(parts.weights()["head.final_logits_bias"], model.final_logits_bias)
    assert own_parameters(family.build_head(parts.spec))["final_logits_bias"].shape == (1, VOCABULARY)
    _, loss, _ = reference_step(parts, batch)
    assert float(parts.loss_sum(batch).detach()) / target_weight(targets(batch)) == pytest.approx(loss, rel=1e-5)


def test_the_specification_of_a_t5_says_whether_its_output_layer_is_its_own():
    family = family_named("t5")
    models = {name: build_parts(tiny_spec(name), seed=1).reference for name in ("t5", "t5-1.1")}
    for name, model in models.items():
        assert family.spec_from_model(model, "seq2seq").config["own_lm_head"] is (name == "t5-1.1")
    with pytest.raises(ValueError, match="own_lm_head: expected True"):
        family.split(models["t5-1.1"], tiny_spec("t5"))


def test_labels_of_a_causal_model_have_no_loss_at_the_first_position():
    spec = tiny_spec("gpt2")
    batch = tiny_batch(spec)
    batch["labels"][2, 0] = 7
    with pytest.raises(ValueError, match="expected -100 at the first position"):
        build_parts(spec, seed=0).loss_sum(batch)


@pytest.mark.parametrize("server_layers", [-1, NUM_BLOCKS + 2, "two"])
def test_a_causal_model_leaves_the_devices_at_least_one_block(server_layers):
    spec = tiny_spec("llama")
    spec = ModelSpec(family="llama", head=spec.head, config={**spec.config, "server_layers": server_layers})
    with pytest.raises(ValueError, match="model.server-layers: expected 0 to 6"):
        family_named("llama").num_blocks(spec)


def test_class_weights_of_the_specification_are_no_parameters():
    spec = tiny_spec("electra", "sequence-classification")
    weighted = ModelSpec(
        family=spec.family, head=spec.head, config={**spec.config, "class_weights": [0.0, 1.0, 2.0, 3.0]}
    )
    parts, plain, batch = evaluation(build_parts(weighted, 0)), evaluation(build_parts(spec, 0)), tiny_batch(spec)
    assert parts.weights().keys() == plain.weights().keys()
    each = torch.nn.functional.cross_entropy(plain.logits(batch), batch["labels"], reduction="none")
    torch.testing.assert_close(parts.loss_sum(batch), (each * batch["labels"]).sum())
