"""Pairs of texts: read from two columns, and encoded as the transformers library does."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.sources import load_config
from flower_app.export import export_run
from flower_app.first_config.first_config import FirstConfigRequest, make_first_config
from flower_app.prediction_file import read_text_rows
from flower_app.python_api import Run
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.pairs import with_single_rule
from flower_app.tasks.tokenizer import TextTokenizer
from helpers.task_cases import options, prepare, save, train

NAME = "sequence-classification"
LONGEST = 24
ROWS = [
    (f"a {one} is here", f"we see the {other}", f"{one}-{other}") for one in ("dog", "cat") for other in ("sun", "moon")
] * 12
ROWS += [
    ("the long tale of the king and his door " * 3, "short", "dog-sun"),
    ("one", "the long tale of the lamp and the tree by the door " * 2, "cat-moon"),
    (
        "the king and the dog by the tree at the door with a lamp",
        "the cat and the dog by the tree at a lamp",
        "dog-moon",
    ),
]


def write(folder, rows=ROWS):
    keys = ("sentence1", "sentence2", "label")
    (folder / "train.jsonl").write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))


def config(folder, **changes):
    """Go through the keys of a configuration file, as a user does."""
    values = {
        "source": "files",
        "path": str(folder),
        "train-source": "train.jsonl",
        "test-source": "train.jsonl",
        "source-column": "sentence1",
        "pair-column": "sentence2",
        "max-length": LONGEST,
        "vocab-size": 400,
    }
    return load_config(None, {"task.name": NAME, **{f"data.{key}": value for key, value in (values | changes).items()}})


def tokenizer_of(family):
    """Make the library's tokenizer of a family, with the family's rule for pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bytewise = family in ("roberta", "xlm-roberta")
    names = ["<s>", "<pad>", "</s>", "<unk>"] if bytewise else ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    begin, pad, end, unknown = names
    backend = Tokenizer(models.BPE(unk_token=unknown) if bytewise else models.WordPiece(unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel() if bytewise else pre_tokenizers.BertPreTokenizer()
    trainer = (trainers.BpeTrainer if bytewise else trainers.WordPieceTrainer)(vocab_size=320, special_tokens=names)
    backend.train_from_iterator([text for row in ROWS for text in row[:2]], trainer)
    ids = {name: backend.token_to_id(name) for name in names}
    if family == "roberta":
        backend.post_processor = processors.RobertaProcessing((end, ids[end]), (begin, ids[begin]))
    elif family == "xlm-roberta":
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} {end} $B {end}", special_tokens=list(ids.items())
        )
    else:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=list(ids.items())
        )
    inputs = ["input_ids", "attention_mask"]
    if family in ("bert", "electra", "deberta-v2"):
        inputs.append("token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=inputs,
        pad_token=pad,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
    )


@pytest.mark.parametrize(
    "family", ["bert", "electra", "deberta-v2", "roberta", "xlm-roberta", "distilbert", "modernbert"]
)
def test_a_pair_has_the_ids_and_logits_of_the_library(tmp_path, family):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write(tmp_path)
    library_tokenizer = tokenizer_of(family)
    library_tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if family == "distilbert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    if family in ("roberta", "xlm-roberta"):
        sizes |= {"type_vocab_size": 1}
    if family == "electra":
        sizes |= {"embedding_size": 16}
    torch.manual_seed(1)
    library_config = AutoConfig.for_model(
        family,
        vocab_size=len(library_tokenizer),
        max_position_embeddings=64,
        pad_token_id=library_tokenizer.pad_token_id,
        bos_token_id=library_tokenizer.bos_token_id,
        eos_token_id=library_tokenizer.eos_token_id,
        cls_token_id=library_tokenizer.bos_token_id,
        sep_token_id=library_tokenizer.eos_token_id,
        num_labels=4,
        **sizes,
    )
    AutoModelForSequenceClassification.from_config(library_config).save_pretrained(tmp_path / "model")
    # The head's names are placeholders: a list says which class is which.
    data = config(tmp_path, labels=",".join(sorted({row[2] for row in ROWS}))).data
    prepared = prepare(NAME, data, options(family=family, pretrained=str(tmp_path / "model"), max_length=64))
    parts = prepared.build(0)
    for module in (parts.embedding, parts.blocks, parts.head):
        module.eval()
    examples = task(TaskConfig(name=NAME)).read(data, "train", None)
    share = task(TaskConfig(name=NAME)).encode_examples(
        examples,
        tuple(sorted({row[2] for row in ROWS})),
        TextTokenizer.from_json(prepared.tokenizer_json),
        LONGEST,
        "train",
    )
    batch = share.collate(range(len(share)))
    firsts, seconds, _ = zip(*ROWS, strict=True)
    expected = library_tokenizer(
        [text.strip() for text in firsts],
        [text.strip() for text in seconds],
        truncation="longest_first",
        max_length=LONGEST,
        padding=True,
        return_tensors="pt",
    )
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["attention_mask"], expected["attention_mask"].bool())
    if "token_type_ids" in expected:
        assert torch.equal(batch["token_type_ids"], expected["token_type_ids"])
    assert share.truncated == 3
    with torch.no_grad():
        torch.testing.assert_close(parts.logits(batch), parts.reference.eval()(**expected).logits)


def test_what_only_the_pair_tells_is_learned_and_predicted(tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    whole = config(tmp_path, **{"max-length": 40})
    prepared = prepare(NAME, whole.data, options(dropout=0.0))
    # A trained tokenizer has BERT's rule, also for who loads the saved one.
    share = task(TaskConfig(name=NAME)).cluster_data(whole.data, prepared.tokenizer_json, 0, 1, 0)
    tokens = {number: name for name, number in TextTokenizer.from_json(prepared.tokenizer_json).vocabulary().items()}
    shown = [[tokens[i] for i in share.collate([i])["input_ids"][0].tolist()] for i in range(len(share))]
    assert "[CLS] a dog is here [SEP] we see the sun [SEP]".split() in shown
    parts = train(NAME, prepared, whole.data, steps=4)
    score = prepared.evaluator.evaluate(parts, "test")
    run = tmp_path / "runs" / "pairs"
    run.parent.mkdir()
    save(run, NAME, prepared, parts, whole.data)
    (run / "config.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in whole.to_flat().items()))
    found = Run(run)
    pairs = [row[:2] for row in ROWS]
    assert found.predict(pairs) == score.predictions
    assert found.evaluate().predictions == score.predictions
    with pytest.raises(ValueError, match=r"expected a pair \(text, second text\), .* 'sentence2', found 'a dog'"):
        found.predict(["a dog"])
    with pytest.raises(ValueError, match="expected a text or a pair of texts"):
        found.predict([("a dog", " ")])
    result = CliRunner().invoke(app, ["predict", str(run), "--file", "train.jsonl", "--out", "out.jsonl"])
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows] == score.predictions
    result = CliRunner().invoke(app, ["predict", str(run), *pairs[0], *pairs[-1]])
    assert result.stdout.split() == [score.predictions[0], score.predictions[-1]], result.stderr
    # The exported folder says the same of a pair, its token types too.
    export_run(run, tmp_path / "out")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(*pairs[1], return_tensors="pt")
    batch = share.collate([1])
    assert all(torch.equal(inputs[name], batch[name].long()) for name in inputs) and inputs["token_type_ids"].any()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert model.config.id2label[int(model(**inputs).logits.argmax())] == score.predictions[1]


@pytest.mark.slow
def test_the_accuracy_of_pairs_is_more_than_one_text_can_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "dev.jsonl").write_text((tmp_path / "train.jsonl").read_text())
    data = load_config(str(make_first_config(FirstConfigRequest(sources=["train.jsonl"]), str).file)).data
    model = options(dropout=0.0, max_length=80)
    prepared = prepare(NAME, data, model)
    parts = train(NAME, prepared, data, steps=150)
    assert prepared.evaluator.evaluate(parts, "test").metrics["accuracy"] > 0.95


@pytest.mark.parametrize("name", ["translation", "token-classification", "masked-lm", "causal-lm"])
def test_a_task_of_single_texts_refuses_a_second_column(name):
    sets = {"task.name": name, "data.source": "hub", "data.hub-id": "x/y", "data.pair-column": "b"}
    with pytest.raises(
        ValueError, match=r"data\.pair-column: expected task\.name = sequence-classification.*found " + name
    ):
        load_config(None, sets)


@pytest.mark.parametrize("name", ["sequence-classification", "token-classification", "masked-lm", "causal-lm"])
def test_a_task_without_targets_refuses_their_column(name):
    sets = {"task.name": name, "data.source": "hub", "data.hub-id": "x/y", "data.target-column": "b"}
    with pytest.raises(
        ValueError, match=f"data.target-column: expected .* found {name}; .*data.label-column names labels"
    ):
        load_config(None, sets)
    load_config(None, sets | {"data.target-column": "target"})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("translation", "source-column"),
        ("translation", "label-column"),
        ("translation", "target-column"),
        ("masked-lm", "source-column"),
        ("masked-lm", "label-column"),
        ("causal-lm", "source-column"),
        ("causal-lm", "label-column"),
    ],
)
def test_text_files_have_no_columns_to_be_named(name, key):
    sets = {"data.source": "files", "data.train-source": "a.txt", "data.test-source": "b.txt", f"data.{key}": "txt"}
    with pytest.raises(ValueError, match=rf"data\.{key}: the text file a\.txt has no columns, found 'txt'"):
        load_config(None, sets | {"task.name": name})
    # A table beside it has some.
    load_config(None, sets | {"task.name": name, "data.test-source": "b.csv"})


def test_an_empty_or_missing_second_text_is_refused_with_its_place(tmp_path):
    write(tmp_path, [*ROWS[:2], ("a", "", "dog-moon")])
    with pytest.raises(ValueError, match=r"data\.pair-column: .*train\.jsonl, line 3: the text is empty"):
        task(TaskConfig(name=NAME)).check(config(tmp_path).data, options(), 0, 1)
    with pytest.raises(ValueError, match=r"data\.pair-column: .* no column 'b', found sentence1, sentence2, label"):
        task(TaskConfig(name=NAME)).check(config(tmp_path, **{"pair-column": "b"}).data, options(), 0, 1)
    with pytest.raises(ValueError, match=r"data\.pair-column: generated text has no columns"):
        DataConfig(pair_column="b")


def test_a_file_for_a_model_of_pairs_needs_both_columns(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("a,b\none,two\nthree,\n")
    with pytest.raises(ValueError, match=r"line 3: expected a text in the column 'b', found none"):
        read_text_rows(path, "a", "b")
    with pytest.raises(ValueError, match=r"expected the column 'c' of second texts, as in training, found a, b"):
        read_text_rows(path, "a", "c")
    path.write_text("a,b\none,two\n")
    assert read_text_rows(path, "a", "b").inputs == [("one", "two")]


@pytest.mark.parametrize(
    ("single", "pair", "kept"),
    [
        ("$A", "{0} $A {1} {1} $B {1}", "{0} $A {1} {1} $B {1}"),
        ("{0} $A", "{0} $A {1} $B", "{0} $A {1} $B:1 {1}:1"),
        (None, None, "{0} $A {1} $B:1 {1}:1"),
    ],
    ids=["pair", "begin", "none"],
)
def test_an_encoders_tokenizer_gets_the_rule_of_its_texts_and_keeps_that_of_its_pairs(single, pair, kept):
    from tokenizers import processors

    begin, end = "[CLS]", "[SEP]"
    library_tokenizer = tokenizer_of("bert")
    backend = library_tokenizer.backend_tokenizer
    marks = [(name, backend.token_to_id(name)) for name in (begin, end)]

    def rule(*texts):
        single, pair = (text.format(begin, end) for text in texts)
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)

    backend.post_processor = processors.ByteLevel() if single is None else rule(single, pair)
    found = json.loads(with_single_rule(TextTokenizer.from_json(backend.to_str())).vocabulary_json())
    backend.post_processor = rule("{0} $A {1}", kept)
    expected = json.loads(backend.to_str())
    assert found["post_processor"] == expected["post_processor"]
    same = TextTokenizer.from_json(backend.to_str())
    assert with_single_rule(same) is same
