"""A classifier on a decoder-only model scores the token that the library's own class scores."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import auto_model
from client_pipeline.families.lora import adapt
from client_pipeline.families.pretrained import load_pretrained, load_pretrained_weights, trained_classes
from client_pipeline.families.proof import cut_difference
from client_pipeline.partition.spec import LoraConfig
from helpers.decoder_only import small_spec
from helpers.tiny_models import evaluation, library_config, tiny_batch, tiny_spec

SEQUENCES, TOKENS = "sequence-classification", "token-classification"


@pytest.mark.parametrize(
    ("model_type", "head"),
    [("gpt2", SEQUENCES), ("llama", SEQUENCES), ("gemma2", SEQUENCES), ("qwen3", TOKENS), ("falcon", TOKENS)],
)
def test_a_cut_classifier_is_the_whole_one(model_type, head):
    parts = build_parts(small_spec(model_type, head=head), seed=0)
    # Without padding, padded on the right and on the left.
    assert cut_difference(parts) == ""


def test_a_classifier_with_adapters_is_the_whole_one():
    parts = adapt(build_parts(small_spec("llama", head=SEQUENCES), seed=0), LoraConfig(rank=2), seed=1)
    assert "head.classifier.weight" in dict(parts.named_parameters())
    assert cut_difference(parts) == ""
    with pytest.raises(ValueError, match='lora.head: "adapters" would freeze the classifier'):
        adapt(build_parts(small_spec("llama", head=SEQUENCES), seed=0), LoraConfig(head="adapters"), seed=1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_last_real_token_is_scored(side):
    parts = evaluation(build_parts(tiny_spec("llama", SEQUENCES), seed=1))
    ids = torch.tensor([[5, 6, 7]])
    padding = (2, 0) if side == "left" else (0, 2)
    batch = {"input_ids": torch.nn.functional.pad(ids, padding), "labels": torch.tensor([1])}
    batch["attention_mask"] = batch["input_ids"] != 0
    alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "labels": batch["labels"]}
    expected = parts.logits(alone)
    with torch.no_grad():
        whole = parts.reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    torch.testing.assert_close(parts.logits(batch).detach(), whole, rtol=1e-5, atol=1e-6)
    if side == "right":
        torch.testing.assert_close(parts.logits(batch), expected, rtol=1e-5, atol=1e-6)


def test_a_text_that_ends_with_the_padding_is_refused():
    # The library would score the token before it.
    spec = tiny_spec("llama", SEQUENCES)
    batch = tiny_batch(spec)
    batch["input_ids"][0, -1] = 0
    with pytest.raises(ValueError, match="input_ids: expected padding, and no text's last token, to be pad_token_id"):
        build_parts(spec, seed=0).logits(batch)
    nothing = replace(spec, config=spec.config | {"pad_token_id": None})
    with pytest.raises(ValueError, match="pad_token_id: expected the id of the padding"):
        build_parts(nothing, seed=0).logits(tiny_batch(spec))


def test_a_model_type_without_a_classifier_is_refused_by_name():
    with pytest.raises(ValueError, match="model type 'granite' has no head sequence-classification"):
        build_parts(small_spec("granite", head=SEQUENCES), seed=0)


def test_a_language_model_gets_a_new_classifier_of_the_seed(tmp_path):
    torch.manual_seed(0)
    model = auto_model("causal-lm").from_config(library_config("qwen3"))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert trained_classes(str(tmp_path), SEQUENCES) == ()
    found = [load_pretrained_weights(str(tmp_path), SEQUENCES, 3, seed, 2) for seed in (1, 1, 2)]
    heads = [weights["head.classifier.weight"] for _, weights in found]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (3, 16)
    # Its own weights stay in the file.
    spec, weights = found[0]
    assert spec.config["server_layers"] == 2
    assert weights.base is not None and "blocks.4.layer.self_attn.q_proj.weight" in weights.base
    assert weights.whole_base is None


def test_a_trained_classifier_goes_on(tmp_path):
    torch.manual_seed(0)
    names = {0: "bad", 1: "fine", 2: "good", 3: "poor"}
    config = library_config("qwen3", id2label=names, label2id={name: i for i, name in names.items()})
    model = auto_model(SEQUENCES).from_config(config).eval()
    model.save_pretrained(tmp_path)
    assert trained_classes(str(tmp_path), SEQUENCES) == ("bad", "fine", "good", "poor")
    parts = evaluation(load_pretrained(str(tmp_path), SEQUENCES, server_layers=2))
    batch = tiny_batch(parts.spec)
    with torch.no_grad():
        expected = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
        torch.testing.assert_close(parts.logits(batch), expected, rtol=1e-5, atol=1e-6)
    fresh = load_pretrained(str(tmp_path), SEQUENCES, new_head=True)
    assert not torch.equal(fresh.head.classifier.weight, parts.head.classifier.weight)
    with pytest.raises(ValueError, match="the classifier of a Qwen3ForSequenceClassification does not tell classes of"):
        trained_classes(str(tmp_path), TOKENS)
