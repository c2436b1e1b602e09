"""The attack on updates names the tokens of a step where it should, and nothing where the span or noise hides them."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import LoraConfig
from flower_app.leakage.updates import first_examples, read_update
from helpers.tiny_models import CLASSIC, tiny_batch, tiny_spec

FAMILIES = [("bert", "token-classification"), ("llama", "causal-lm"), ("gpt2", "causal-lm")]


def attacked(family, head, size, length, privacy=None, **more):
    spec = replace(tiny_spec(family, head, dropout=0.0), **more)
    parts = build_parts(spec, seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    before = parts.weights()
    batch = tiny_batch(spec, size=size, length=length, seed=3, padded=False)
    found = read_update(parts, batch, spec.config["vocab_size"], 1.0, privacy)
    assert all(value.equal(before[name]) for name, value in parts.weights().items())
    return found, parts, batch


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_an_example_shorter_than_the_width_is_read_whole(family, head):
    found, _, _ = attacked(family, head, 1, 6)
    # Nothing is predicted from a text's last token.
    all_tokens = 1.0 if family == "bert" else 5 / 6
    assert found.by_span == pytest.approx(all_tokens) and found.wrong == 0 and found.examples == 1
    # GPT-2's tied matrix changes in all of its rows.
    assert found.by_rows == pytest.approx(0.0 if family == "gpt2" else all_tokens)
    assert found.rank < found.width and found.read == pytest.approx(all_tokens)


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_of_as_many_tokens_as_the_width_the_span_tells_nothing(family, head):
    found, _, _ = attacked(family, head, 12, 8)
    assert found.by_span == 0 and found.rank >= found.width - 1


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_an_adapter_hides_more_tokens_than_it_has_ranks(family, head):
    found, parts, batch = attacked(family, head, 1, 8, lora=LoraConfig(rank=2))
    # B begins with zeros, so that A's gradient is zero.
    assert found.rank == 0 and found.read == 0
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(4))
    vocabulary = parts.spec.config["vocab_size"]
    assert read_update(parts, batch, vocabulary, 1.0).read < 0.3
    short = first_examples({key: value[:, :2] if value.ndim > 1 else value for key, value in batch.items()}, 1, head)
    assert read_update(parts, short, vocabulary, 1.0).read == (1.0 if family == "bert" else 0.5)


def test_a_first_block_that_stays_as_it_is_tells_nothing():
    found, _, _ = attacked("llama", "causal-lm", 1, 6, lora=LoraConfig(rank=2, first_block=1))
    assert (found.rank, found.by_span, found.by_rows) == (0, 0.0, 0.0)


@pytest.mark.parametrize("head", ["sequence-classification", "token-classification"])
def test_the_heads_update_names_the_labels_of_an_example_and_noise_hides_them(head):
    spec = tiny_spec("bert", head, dropout=0.0)
    parts = build_parts(spec, seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    batch = tiny_batch(spec, size=1, length=2, seed=3, padded=False)
    assert len(set(batch["labels"].flatten().tolist())) < spec.config["num_labels"]

    def told(privacy=None, head=True):
        return read_update(parts, batch, spec.config["vocab_size"], 0.1, privacy, head=head).labels

    assert told() == 1.0 and told(head=False) is None
    noisy = [told(PrivacyConfig(update_clip=1e-3, update_noise=100.0, seed=seed)) for seed in range(20)]
    assert sum(noisy) < 15


# Of small steps, rounding of the sent bias takes some tokens without a label below zero.
@pytest.mark.parametrize(("smoothing", "lr"), [(0.0, 0.1), (0.1, 0.1), (0.1, 1e-3)])
def test_the_update_of_a_decoder_names_the_target_sentence(smoothing, lr):
    spec = replace(CLASSIC, config=CLASSIC.config | {"label_smoothing": smoothing})
    parts = build_parts(spec, seed=1)
    with torch.no_grad():
        # A trained model gives most tokens next to nothing.
        parts.head.output_bias.normal_(generator=torch.Generator().manual_seed(4))
        parts.head.output_bias[::2] -= 12
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    batch = first_examples(tiny_batch(spec, size=2, length=4, seed=3, padded=False), 1, "seq2seq")
    source, target = (set(batch[name].flatten().tolist()) for name in ("input_ids", "labels"))
    assert target - source and source - target

    def read(head, **more):
        return read_update(parts, batch, spec.config["vocab_size"], lr, head=head, **more)

    whole, encoder = read(True), read(False)
    assert whole.read == whole.labels == 1.0 and whole.wrong == 0
    assert encoder.labels is None and encoder.read == pytest.approx(len(source) / len(source | target))
    noise = PrivacyConfig(update_clip=1.0, update_noise=0.1, seed=5)
    assert read(True, privacy=noise).read == 0


def test_the_update_of_a_head_names_the_words_that_it_is_to_fill_in():
    spec = tiny_spec("bert", "masked-lm", dropout=0.0)
    parts = build_parts(spec, seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    batch = first_examples(tiny_batch(spec, size=2, length=8, seed=3, padded=False), 1, "masked-lm")
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, ::2] = IGNORED_LABEL
    hidden = set(batch["labels"][:, 1::2].flatten().tolist())
    batch["input_ids"][:, 1::2] = 4
    tokens = hidden | set(batch["input_ids"].flatten().tolist())
    whole, encoder = (read_update(parts, batch, spec.config["vocab_size"], 0.1, head=head) for head in (True, False))
    # The embedding scores the vocabulary, too, and changes in all of its rows.
    assert whole.labels == 1.0 and whole.by_rows == pytest.approx(len(hidden) / len(tokens)) and whole.wrong == 0
    assert encoder.labels is None and encoder.by_rows == 0


def test_noise_on_updates_hides_rows_and_span():
    privacy = PrivacyConfig(update_clip=1.0, update_noise=0.1, seed=5)
    found, _, _ = attacked("bert", "token-classification", 1, 6, privacy)
    assert found.read == 0 and found.rank == found.width
    clipped, _, _ = attacked("bert", "token-classification", 1, 6, replace(privacy, update_noise=0.0))
    assert clipped.read == 1.0


def test_the_first_examples_have_no_padding_of_the_others():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    batch = {"input_ids": torch.ones(3, 4), "attention_mask": mask, "labels": torch.arange(3)}
    two = first_examples(batch, 2, "sequence-classification")
    assert two["input_ids"].shape == (2, 3) and two["attention_mask"].shape == (2, 3)
    assert two["labels"].tolist() == [0, 1]
    none = first_examples(batch | {"attention_mask": torch.zeros_like(mask)}, 2, "sequence-classification")
    assert none["input_ids"].shape == (2, 1)
