"""Masked and causal language models: their data, their scores, their use, and what starts from them."""

import json
import math
import pickle

import numpy as np
import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import IGNORED_LABEL, target_weight, targets
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.generated.generator import generate
from flower_app.tasks.masked_lm import MaskedData
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.word_pieces import train_wordpiece
from helpers.task_cases import options, prepare, save, train

MASKED, CAUSAL = "masked-lm", "causal-lm"
SMALL = DataConfig(num_examples=120, evaluation_examples=20, vocab_size=400, max_length=40)
MODELS = {MASKED: options(), CAUSAL: options(family="gpt2")}

both = pytest.mark.parametrize("name", [MASKED, CAUSAL])


def share_of(name, data, found, cluster=0, num_clusters=1):
    return task(TaskConfig(name=name)).cluster_data(data, found.tokenizer_json, cluster, num_clusters, 0)


def files(folder, name="train.txt", **changes):
    base = {"vocab_size": 300, "max_length": 40, "train_source": name, "test_source": name}
    return DataConfig(source="files", path=str(folder), **{**base, **changes})


@pytest.fixture(scope="module")
def prepared():
    return {name: prepare(name, SMALL, model, num_clusters=3) for name, model in MODELS.items()}


# Data.


@both
def test_language_models_read_the_words_of_tagged_sentences_and_no_tags(tmp_path, name):
    # The lines of such a file, tags and all, were once the text.
    (tmp_path / "a.txt").write_text("A dog barks\nThe king reads")
    sentences = (("A", "dog", "barks"), ("The", "king", "reads"))
    (tmp_path / "b.conll").write_text("\n\n".join("\n".join(f"{w}\tO" for w in words) for words in sentences))
    plain, tagged = (prepare(name, files(tmp_path, file), MODELS[name]) for file in ("a.txt", "b.conll"))
    assert tagged.tokenizer_json == plain.tokenizer_json
    found = [share_of(name, files(tmp_path, file), plain, 0, 1).sequences for file in ("a.txt", "b.conll")]
    assert found[0].ids.tolist() == found[1].ids.tolist() and len(found[0]) == len(found[1]) == 2


@both
def test_text_files_tables_and_hub_datasets_give_the_same_text(tmp_path, name):
    texts = ["A dog barks.", "The king reads a long book."]
    (tmp_path / "a.txt").write_text(texts[0] + "\n\n" + texts[1] + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (*texts, "")))
    (tmp_path / "c.tsv").write_text("id\tbody\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(texts)))
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"text": texts})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "hub"))
    hub = DataConfig(source="hub", hub_id=str(tmp_path / "hub"), vocab_size=300, max_length=40)
    for data in (
        files(tmp_path, "a.txt"),
        files(tmp_path, "b.jsonl"),
        files(tmp_path, "c.tsv", source_column="body"),
        hub,
    ):
        found = prepare(name, data, MODELS[name])
        tokenizer, share = TextTokenizer.from_json(found.tokenizer_json), share_of(name, data, found)
        rows = [share.sequences.padded([i], 0)[0, 1:-1].tolist() for i in range(len(share))]
        assert sorted(rows) == sorted(tokenizer.encode(texts))


@both
@pytest.mark.parametrize("words", [1, 3, 4, 5, 8, 10])
def test_a_long_text_goes_on_in_the_next_sequence_and_nothing_is_lost(tmp_path, name, words):
    text = " ".join("abcdefghij"[:words])
    (tmp_path / "train.txt").write_text(text + "\n")
    data = files(tmp_path, max_length=6)
    found = prepare(name, data, MODELS[name])
    tokenizer, share = TextTokenizer.from_json(found.tokenizer_json), share_of(name, data, found)
    rows = [share.sequences.padded([i], 0)[0].tolist() for i in range(len(share))]
    ids = tokenizer.encode([text])[0]
    assert all(2 <= len(row) <= 6 for row in rows) and share.truncated == 0
    if name == MASKED:
        # An encoder has both marks around whatever it reads, and no loss at them.
        assert all((row[0], row[-1]) == (tokenizer.bos_id, tokenizer.eos_id) for row in rows)
        assert [i for row in rows for i in row[1:-1]] == ids
        return
    # Every token has one loss, and so has the end: it stands where the document ends, and at no cut.
    labels = [i for at in range(len(share)) for i in share.collate([at])["labels"][0].tolist() if i != IGNORED_LABEL]
    assert labels == [*ids, tokenizer.eos_id]
    assert [row[0] == tokenizer.bos_id for row in rows] == [True] + [False] * (len(rows) - 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", r"data\.train-source: .*a\.txt is empty"),
        ("a.jsonl", '{"text": ""}', r"data\.source-column: .*a\.jsonl has no text in column 'text'"),
        ("a.jsonl", '{"txt": "a"}', r"a\.jsonl, line 1: no column 'text', found txt; did you mean 'txt'"),
    ],
)
def test_damaged_text_is_refused_with_its_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        task(TaskConfig(name=MASKED)).check(files(tmp_path, name), options(), 0, 1)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        (
            MASKED,
            {"family": "gpt2"},
            "task.name = masked-lm: expected model.family to be one of bert, .*, found 'gpt2'",
        ),
        (CAUSAL, {}, "task.name = causal-lm: expected model.family to be one of gpt2, llama, .*, found 'bert'"),
        (CAUSAL, {"family": "llama", "label_smoothing": 0.1}, "model.label-smoothing: task.name = causal-lm has none"),
    ],
)
def test_a_model_that_cannot_learn_the_task_is_refused(name, model, message):
    with pytest.raises(ValueError, match=message):
        prepare(name, SMALL, options(**model))


def test_a_tokenizer_without_a_mask_is_refused(tmp_path, prepared):
    (tmp_path / "tokenizer.json").write_text(prepared[CAUSAL].tokenizer_json)
    data = DataConfig(**{**SMALL.__dict__, "tokenizer": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data\.tokenizer: expected a token \[MASK\] or <mask>"):
        prepare(MASKED, data)


# Masks.


def test_masks_follow_berts_shares():
    bos, eos, mask, pad, size = 1, 2, 3, 0, 500
    rng = np.random.default_rng(0)
    rows = [[bos, *rng.integers(4, size, length).tolist(), eos] for length in (300, 200, 250)]
    share = MaskedData(EncodedText.of(rows, 0), 0.15, mask, pad, size)
    plain, chosen, masked, kept = 0, 0, 0, 0
    for seed in range(40):
        batch, truth = share.collate([0, 1, 2], seed), share.sequences.padded([0, 1, 2], pad)
        at = batch["labels"] != IGNORED_LABEL
        assert (batch["labels"][at] == truth[at]).all()
        assert (batch["input_ids"][~at] == truth[~at]).all()
        assert not (at & (truth < 4)).any()
        plain += int((truth >= 4).sum())
        chosen += int(at.sum())
        masked += int((batch["input_ids"][at] == mask).sum())
        kept += int((batch["input_ids"][at] == truth[at]).sum())
    assert chosen / plain == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.02)
    assert kept / chosen == pytest.approx(0.1, abs=0.02)


def test_masks_change_with_the_step_and_are_the_same_when_a_run_goes_on(prepared):
    share = share_of(MASKED, SMALL, prepared[MASKED])
    again = pickle.loads(pickle.dumps(share))
    first, second = (StepId(seed=3, round=r, step=1, cluster=0).data_seed for r in (1, 2))
    assert not torch.equal(share.collate([3, 1], first)["labels"], share.collate([3, 1], second)["labels"])
    for key, tensor in share.collate([3, 1], second).items():
        assert torch.equal(again.collate([3, 1], second)[key], tensor)


# Training, scores and use.


@pytest.mark.slow
@both
def test_generated_text_is_learned_in_a_few_steps(name):
    data = DataConfig(num_examples=400, evaluation_examples=50, vocab_size=400, max_length=40)
    found = prepare(name, data, options(family=MODELS[name].family, dropout=0.0))
    before = found.evaluator.evaluate(found.build(seed=0), "test").metrics
    parts = train(name, found, data, steps=80)
    score = found.evaluator.evaluate(parts, "test")
    assert score.metrics["perplexity"] == pytest.approx(math.exp(score.metrics["loss"]))
    assert score.metrics["perplexity"] < 0.3 * before["perplexity"]
    assert found.evaluator.evaluate(parts, "test").metrics == score.metrics
    small = task(TaskConfig(name=name, evaluate_batch_size=3)).evaluator(data, found.tokenizer_json)
    assert small.evaluate(parts, "test").metrics["loss"] == pytest.approx(score.metrics["loss"], rel=1e-5)


def test_the_loss_is_the_mean_over_all_foretold_tokens(prepared):
    found = prepared[CAUSAL]
    parts, data = build_parts(found.spec, 0), found.evaluator._data["test"]
    for part in (parts.embedding, parts.blocks, parts.head):
        part.eval()
    losses, weight = 0.0, 0
    for i in range(len(data)):
        batch = data.collate([i])
        logits = parts.logits(batch)[0, :-1]
        losses += float(torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="sum"))
        weight += target_weight(targets(batch))
    assert weight == sum(data.sequences.lengths()) - len(data)
    assert found.evaluator.evaluate(parts, "test").metrics["loss"] == pytest.approx(losses / weight, rel=1e-5)


def test_masks_in_a_text_are_filled(prepared):
    found, chosen = prepared[MASKED], task(TaskConfig(name=MASKED))
    parts = build_parts(found.spec, 0)
    (filled,) = chosen.predict(parts, found.tokenizer_json, ["the [MASK] sees [MASK]."])
    assert filled.startswith("the ") and " sees " in filled and filled.endswith(".") and "[MASK]" not in filled
    with pytest.raises(ValueError, match=r"expected a text with \[MASK\] in it, found 'the dog'"):
        chosen.predict(parts, found.tokenizer_json, ["the dog"])
    with pytest.raises(ValueError, match="a text of over 40 tokens does not fit the model"):
        chosen.predict(parts, found.tokenizer_json, ["[MASK] " + "a " * 40])


def test_a_text_is_continued_up_to_the_limit(prepared):
    found = prepared[CAUSAL]
    parts = build_parts(found.spec, 0)
    (text,) = task(TaskConfig(name=CAUSAL, max_new_tokens=3)).predict(parts, found.tokenizer_json, ["The dog"])
    assert text.startswith("The dog")
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    (longest,) = task(TaskConfig(name=CAUSAL, max_new_tokens=500)).predict(parts, found.tokenizer_json, ["The dog"])
    assert len(tokenizer.encode([longest])[0]) <= 39
    with pytest.raises(ValueError, match="a text of over 40 tokens does not fit the model"):
        task(TaskConfig(name=CAUSAL)).predict(parts, found.tokenizer_json, ["a " * 60])


def test_a_pretrained_causal_model_brings_its_tokenizer_and_keeps_blocks_on_the_server(tmp_path, prepared):
    found = prepared[CAUSAL]
    build_parts(found.spec, seed=4).reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(found.tokenizer_json)
    parts = prepare(CAUSAL, SMALL, options(family="gpt2", pretrained=str(tmp_path))).build(seed=0)
    assert (len(parts.blocks), len(parts.head.blocks)) == (2, 1)
    expected = build_parts(found.spec, seed=4).weights()
    assert all(torch.equal(value, expected[key]) for key, value in parts.weights().items())


# Starting from another run.


def test_a_classifier_starts_from_a_masked_language_model(tmp_path, prepared):
    found = prepared[MASKED]
    run = save(tmp_path / "run", MASKED, found, build_parts(found.spec, seed=4), SMALL)
    start = prepare("sequence-classification", SMALL, options(from_=run, width=64))
    weights, before = start.build(seed=0).weights(), build_parts(found.spec, seed=4).weights(head=False)
    assert start.tokenizer_json == found.tokenizer_json
    for key, value in before.items():
        assert torch.equal(weights[key], value), key
    heads = [start.build(seed=seed).head.classifier.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_translation_goes_on_from_a_translation(tmp_path):
    model = options(family="transformer", encoder_layers=1)
    found = prepare("translation", SMALL, model)
    run = save(tmp_path / "run", "translation", found, build_parts(found.spec, seed=4), SMALL)
    again = prepare("translation", SMALL, options(family="transformer", from_=run, label_smoothing=0.1))
    assert again.spec.config["label_smoothing"] == 0.1
    weights = again.build(seed=0).weights()
    for key, value in build_parts(found.spec, seed=4).weights().items():
        assert torch.equal(weights[key], value), key


def test_a_start_that_does_not_fit_is_refused(tmp_path, prepared):
    with pytest.raises(
        ValueError, match=r"model\.from: expected the directory of a run, or its name in runs-dir, found"
    ):
        prepare(MASKED, SMALL, options(from_=str(tmp_path / "nothing")))
    found = prepared[MASKED]
    run = save(tmp_path / "run", MASKED, found, build_parts(found.spec, seed=4), SMALL)
    with pytest.raises(ValueError, match=r"is of family bert, but model\.family = electra; change one of them"):
        prepare(MASKED, SMALL, options(family="electra", from_=run))
    long = DataConfig(**{**SMALL.__dict__, "max_length": 64})
    with pytest.raises(ValueError, match=r"data\.max-length: 64 exceeds the 40 positions of"):
        prepare(MASKED, long, options(from_=run))
    other = train_wordpiece((text for text, _ in generate(2000, "train", 5)), 1000, False, False)
    (tmp_path / "tokenizer.json").write_text(other.to_json())
    data = DataConfig(**{**SMALL.__dict__, "tokenizer": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data\.tokenizer: its vocabulary of \d+ tokens does not match the \d+ of"):
        prepare(MASKED, data, options(from_=run))
