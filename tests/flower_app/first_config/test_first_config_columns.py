"""``collapipe init``: pairs of texts, labels that are no classes, left-over columns, and lengths in tokens."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.sources import load_config
from flower_app.tasks.base import task
from flower_app.tasks.word_pieces import train_wordpiece
from helpers.command_line import write_rows

pytestmark = pytest.mark.usefixtures("elsewhere")


def write(rows, name="train.csv"):
    """Write a table of rows, and the same rows to score on."""
    for file in (name, name.replace("train", "dev")):
        write_rows(file, rows)


def init(*options, name="train.csv"):
    return CliRunner().invoke(app, ["init", name, "--out", "mine.toml", *options])


def configured(*options, name="train.csv"):
    result = init(*options, name=name)
    assert result.exit_code == 0, result.stderr
    return load_config("mine.toml")


def share_of(config):
    chosen = task(config.task)
    prepared = chosen.prepare(config.data, config.model, 0, 1)
    return chosen.cluster_data(config.data, prepared.tokenizer_json, 0, 1, 0)


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [
        ("premise", "hypothesis", {"idx": "1"}),
        ("sentence1", "sentence2", {"idx": "1"}),
        ("#1 String", "#2 String", {"#1 ID": "702876", "#2 ID": "702977"}),
        ("question1", "question2", {"qid1": "1", "qid2": "2"}),
        ("text_a", "text_b", {}),
        ("question", "sentence", {}),
        ("query", "document", {}),
    ],
)
def test_two_columns_of_texts_with_a_label_are_read_as_pairs(first, second, others):
    rows = [
        {second: f"cats {i} run there fast", "label": ("yes", "no")[i % 2], **others, first: f"the dogs {i} here"}
        for i in range(40)
    ]
    write(rows)
    data = configured().data
    assert (data.source_column, getattr(data, "pair_column", ""), data.label_column) == (first, second, "label")


def test_pairs_without_usual_names_are_named_and_what_is_left_over_is_told():
    rows = [{"title": f"a title {i}", "body": f"the body {i}", "label": "xy"[i % 2], "day": "1"} for i in range(40)]
    write(rows)
    result = init()
    assert result.exit_code == 0 and "not used: body, day" in result.stderr
    Path("mine.toml").unlink()
    data = configured("--text-column", "title", "--pair-column", "body").data
    assert (data.source_column, data.pair_column) == ("title", "body")
    Path("mine.toml").unlink()
    assert "--pair-column: no column 'bodi', found title, body" in init("--pair-column", "bodi").stderr


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (lambda i: {"score": f"{i / 17:.2f}"}, (), "the column score: found numbers with fractions"),
        (lambda i: {"score": f"{i / 17:.2f}"}, ("--label-column", "score"), "a score to predict (regression)"),
        (lambda i: {"label": f"{i % 5 / 2}"}, (), "the column label: found numbers with fractions"),
        (lambda i: {"label": f"{i % 5 / 2}".replace(".", ",")}, (), "a score to predict (regression)"),
        (lambda i: {"label": str(i % 2), "rating": f"{i % 3 / 2}"}, ("--label-column", "rating"), "(regression)"),
        (lambda i: {"key": f"k{i}"}, ("--label-column", "key"), "60 different labels in 60 examples"),
        (lambda i: {"age": i % 50}, ("--label-column", "age"), "50 different labels in 60 examples"),
        (lambda i: {"note": f"a note of {i} words"}, ("--label-column", "note"), "a free text is no class"),
        (lambda i: {k: int(i % 3 == j) for j, k in enumerate("pqr")}, (), "the columns p, q, r are one label"),
        (lambda i: {k: i // 2**j % 2 for j, k in enumerate("pqr")}, (), "a text may have several"),
        (lambda i: {k: i // 2**j % 2 == 1 for j, k in enumerate("pq")}, (), "name one of them with --label-column"),
        (lambda i: {"label": ("a", "b", "a|b")[i % 3]}, (), "the column label has 'a|b'"),
    ],
)
def test_what_is_no_class_is_refused_by_its_column(labels, options, message):
    write([{"text": f"the text of number {i}", **labels(i)} for i in range(60)])
    result = init(*options)
    assert message in result.stderr and result.exit_code == 2
    assert not Path("mine.toml").exists()


def test_a_run_refuses_scores_and_ids_unless_they_are_listed():
    rows = [{"text": f"the text of number {i}", "label": f"{i % 5 / 2}", "key": f"k{i}"} for i in range(60)]
    write(rows)
    keys = {
        "task.name": "sequence-classification",
        "data.source": "files",
        "data.train-source": "train.csv",
        "data.test-source": "dev.csv",
        "model.family": "bert",
        "data.vocab-size": 400,
    }
    for changes, message in (
        ({}, r"data\.label-column: found numbers with fractions, 5 different labels in 60 examples"),
        ({"data.label-column": "key"}, r"data\.label-column: found 60 different labels in 60 examples"),
    ):
        config = load_config(None, keys | changes)
        with pytest.raises(ValueError, match=message):
            task(config.task).check(config.data, config.model, 0, 1)
    listed = load_config(None, keys | {"data.labels": "0.0,0.5,1.0,1.5,2.0"})
    task(listed.task).check(listed.data, listed.model, 0, 1)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("ร้าน อาหาร ดี มาก ไม่ อร่อย บริการ ช้า ราคา ถูก แพง สะอาด", 18),
        ("ភោជនីយដ្ឋាន ល្អ ណាស់ មិន ឆ្ងាញ់ សេវា យឺត តម្លៃ ថោក", 12),
        ("รถ ไฟ ถึง ช้า เร็ว ตรง เวลา", 60),
        ("A C G T", 90),
        ("A C G T", 240),
        ("shop / ? = & id . com path -", 40),
    ],
)
def test_texts_without_blanks_are_as_long_as_the_runs_tokenizer_makes_them(words, number):
    rng = random.Random(0)
    write([{"text": "".join(rng.choices(words.split(), k=number)), "label": "xy"[i % 2]} for i in range(60)])
    config = configured()
    share = share_of(config)
    assert share.truncated == 0
    assert 16 < share.sequences.lengths().max() <= config.data.max_length


def test_lengths_are_those_of_a_pretrained_models_tokenizer():
    from transformers import BertConfig, BertModel

    letters = train_wordpiece(["a b c d e f g h i j k l m n o p"], 300, False, False)
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(letters.to_json())
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=letters.vocab_size, **sizes)).save_pretrained("model")
    write([{"text": "a b c d " * 20, "label": "xy"[i % 2]} for i in range(40)])
    config = configured("--pretrained", "model")
    assert 82 <= config.data.max_length <= 88


@pytest.mark.parametrize("name", ["train.conll", "train.jsonl"])
@pytest.mark.parametrize(
    ("tags", "code"), [("B-PER E-PER O S-LOC", 0), ("B-PER L-PER O U-LOC", 0), ("NOUN NOUN VERB NOUN", 2)]
)
def test_tags_of_other_schemes_are_read_or_refused_before_anything_is_ready(name, tags, code):
    words = ["Ada", "King", "sees", "Bonn"]
    if name.endswith("jsonl"):
        write([{"tokens": words, "tags": tags.split()}] * 40, name)
    else:
        text = "".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags.split(), strict=True)) + "\n"
        for file in (name, "dev.conll"):
            Path(file).write_text(text * 40)
    result = init(name=name)
    assert result.exit_code == code, result.stderr
    if code:
        assert "found 'NOUN'; write B-NOUN for a word that is a span of its own" in result.stderr
    else:
        assert load_config("mine.toml").data.labels == "LOC,PER"


@pytest.mark.parametrize(
    ("one", "other", "folded"),
    [("Sie", "sie", False), ("KIZ", "kiz", False), ("bạn", "bán", True), ("No", "yes", True)],
)
def test_case_is_folded_where_it_tells_no_classes_apart(one, other, folded):
    rows = [{"text": f"heute {i} {(one, other)[i % 2]} da", "label": "xy"[i % 2]} for i in range(60)]
    write(rows)
    assert configured().data.lowercase is folded


def test_the_two_sides_of_a_translation_both_fit():
    for file, words in (("train.en", 3), ("train.de", 30), ("val.en", 3), ("val.de", 30)):
        Path(file).write_text("".join("word " * words + f"{i}\n" for i in range(60)))
    assert CliRunner().invoke(app, ["init", "train.en", "train.de", "--out", "mine.toml"]).exit_code == 0
    assert load_config("mine.toml").data.max_length >= 32
