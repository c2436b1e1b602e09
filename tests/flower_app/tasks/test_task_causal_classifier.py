"""Texts are classified by a decoder-only model: fresh, from a language model's folder, exported."""

import pytest
import torch

from client_pipeline.families.families import max_length
from flower_app.export import export_run
from flower_app.runs.run_directory import CONFIG
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.tokenizer import TextTokenizer
from helpers.task_cases import options, prepare, save
from helpers.tiny_models import evaluation

NAME = "sequence-classification"
SMALL = DataConfig(num_examples=40, evaluation_examples=12, vocab_size=300, max_length=40)


def byte_level():
    """Give a tokenizer as language models have it: no rule for marks, its end is its padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["a cat sat on a mat"], trainer)
    backend.post_processor = processors.ByteLevel()
    return backend


@pytest.fixture
def language_model(tmp_path):
    """A tiny Qwen2 that was saved as a language model, without a padding."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    backend = byte_level()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=backend.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    folder = tmp_path / "qwen2"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return str(folder)


def exported(folder, found, parts, data):
    """Open a model as a user of the library does."""
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    save(folder, NAME, found, parts, data)
    (folder / CONFIG).write_text("")
    export_run(folder, folder / "out")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "out")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForSequenceClassification.from_pretrained(folder / "out").eval(), tokenizer


def check_use(folder, found, data):
    """Compare the probabilities of a run's model with those of the exported one, in one padded batch."""
    parts = evaluation(found.build(seed=1))
    model, tokenizer = exported(folder, found, parts, data)
    texts = ["a cat sat", "a cat sat on a mat", "a mat"]
    expected = task(TaskConfig(name=NAME)).probabilities(parts, found.tokenizer_json, texts)
    for side in ("right", "left"):
        tokenizer.padding_side = side
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        for row, probabilities in zip(logits.softmax(dim=-1).tolist(), expected, strict=True):
            named = {model.config.id2label[number]: value for number, value in enumerate(row)}
            assert named == pytest.approx(probabilities, abs=1e-5)


def test_a_fresh_llama_classifies_and_is_exported(tmp_path):
    found = prepare(NAME, SMALL, options(family="llama", decoder_layers=1, dropout=0.0))
    parts = found.build(seed=1)
    assert (len(parts.blocks), len(parts.head.blocks)) == (2, 1)
    assert max_length(found.spec) == 40
    assert found.evaluator.evaluate(parts, "test").examples == 12
    check_use(tmp_path / "run", found, SMALL)


def test_a_language_model_reads_a_text_as_its_own_tokenizer_does(tmp_path, language_model):
    found = prepare(NAME, SMALL, options(family="qwen2", pretrained=language_model))
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    assert tokenizer.label_marks == ([], [])
    assert found.spec.config["pad_token_id"] == tokenizer.pad_id == tokenizer.eos_id == 0
    share = task(TaskConfig(name=NAME)).cluster_data(SMALL, found.tokenizer_json, 0, 1, 0)
    batch = share.collate([0, 1, 2, 3])
    assert bool((batch["input_ids"][batch["attention_mask"]] != 0).all())
    assert torch.isfinite(found.build(seed=0).loss_sum(batch))
    check_use(tmp_path / "run", found, SMALL)


def test_pairs_of_a_model_whose_end_is_its_padding_have_no_mark_at_their_end(tmp_path, language_model):
    rows = [("a cat", "a mat", "x"), ("a mat sat", "a cat", "y"), ("a cat sat", "on a mat", "x"), ("a", "b", "y")]
    (tmp_path / "data.tsv").write_text("text\tother\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows))
    data = DataConfig(
        source="files",
        path=str(tmp_path),
        train_source="data.tsv",
        test_source="data.tsv",
        pair_column="other",
        max_length=40,
    )
    found = prepare(NAME, data, options(family="qwen2", pretrained=language_model))
    batch = task(TaskConfig(name=NAME)).cluster_data(data, found.tokenizer_json, 0, 1, 0).collate([0, 1, 2, 3])
    assert torch.isfinite(found.build(seed=0).loss_sum(batch))
    ends = batch["attention_mask"].sum(1) - 1
    assert bool((batch["input_ids"].gather(1, ends[:, None]) != 0).all())
    assert batch["input_ids"][:, 0].tolist() == [0] * 4


def test_words_are_tagged_by_a_decoder_only_model():
    found = prepare("token-classification", SMALL, options(family="qwen3", decoder_layers=1))
    assert found.spec.config["server_layers"] == 1
    assert found.evaluator.evaluate(found.build(seed=1), "test").examples == 12


def test_a_model_type_beyond_the_named_families_is_taken():
    found = prepare(NAME, SMALL, options(family="gemma2", width=32, num_heads=2))
    assert torch.isfinite(torch.tensor(found.evaluator.evaluate(found.build(seed=1), "test").metrics["loss"]))
