"""``collapipe init``: what it makes of tables, tagged words, parallel files, plain text and datasets."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.sources import load_config
from flower_app.first_config.first_config import FirstConfigRequest, make_first_config
from flower_app.first_config.guess import guess_task
from flower_app.first_config.own_text import read_own_text
from flower_app.first_config.recipe import recipe
from flower_app.tasks.word_pieces import train_wordpiece

QUESTIONS = [
    (f"what is the {word} of number {i}", kind) for i in range(60) for word, kind in (("name", "who"), ("size", "how"))
]


pytestmark = pytest.mark.usefixtures("elsewhere")


def write_csv(name, rows, header=("question", "kind")):
    with open(name, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows] if header else rows)


def made(*sources, **options):
    return make_first_config(FirstConfigRequest(sources=sources, **options), lambda text: None)


def test_a_table_becomes_a_configuration_that_is_ready_to_run():
    write_csv("train.csv", QUESTIONS)
    write_csv("dev.csv", QUESTIONS[:6])
    write_csv("test.csv", QUESTIONS[6:12])
    result = CliRunner().invoke(app, ["init", "train.csv", "--out", "mine.toml", "--json"])
    assert result.exit_code == 0, result.stderr
    assert "task: sequence-classification (2 different values in the column kind)" in result.stderr
    assert "wrote " in result.stderr and "next: collapipe run --config mine.toml" in result.stderr
    guess = json.loads(result.stdout)["guess"]
    assert (guess["inputs"], guess["labels"], guess["names"], guess["counts"]) == (
        "question",
        "kind",
        ["how", "who"],
        [60, 60],
    )
    config = load_config("mine.toml")
    assert config.name == "mine" and config.task.name == "sequence-classification"
    assert (config.data.validation_source, config.data.test_source) == ("dev.csv", "test.csv")
    assert (config.data.source_column, config.data.label_column) == ("question", "kind")
    assert config.data.labels == "how,who" and config.optimizer.warmup_steps <= config.optimizer.total_steps / 8
    # Each key says why it has its value.
    text = Path("mine.toml").read_text()
    assert all(" # " in line for line in text.splitlines() if " = " in line and not line.startswith("#"))


def test_objects_lists_and_pairs_are_told_apart():
    rows = [{"id": i, "text": f"a text of number {i}", "label": "ab"[i % 2]} for i in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read_own_text(["train.jsonl"])
    assert (guess_task(text).task, guess_task(text).labels) == ("sequence-classification", "label")
    words = [{"tokens": ["Ada", "sleeps"], "ner_tags": ["B-PER", "O"]}] * 40
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    guess = guess_task(read_own_text(["words.jsonl"]))
    assert (guess.task, guess.inputs, guess.labels, guess.names) == (
        "token-classification",
        "tokens",
        "ner_tags",
        ("PER",),
    )
    write_csv("pairs.csv", [(f"the dog {i}", f"der Hund {i}") for i in range(40)], ("en", "de"))
    guess = guess_task(read_own_text(["pairs.csv"]))
    assert (guess.task, guess.inputs, guess.labels) == ("translation", "en", "de")
    nested = [{"id": i, "translation": {"de": f"der Hund {i}", "en": f"the dog {i}"}} for i in range(40)]
    Path("nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nested))
    guess = guess_task(read_own_text(["nested.jsonl"]))
    assert (guess.task, guess.inputs, guess.labels) == ("translation", "translation.en", "translation.de")
    write_csv("texts.csv", [(f"the dog sees {i} cats",) for i in range(40)], ("text",))
    assert guess_task(read_own_text(["texts.csv"])).task == "masked-lm"


@pytest.mark.parametrize(("name", "end", "blank"), [("train.conll", "\n", "\n"), ("train.txt", "\r\n", " \r\n")])
def test_tagged_words_become_a_tagging_run(name, end, blank):
    sentences = ["Ada\tB-PER\nsleeps\tO\n\n", "Bonn\tB-LOC\nis\tO\nold\tO\n\n"] * 20
    Path(name).write_bytes("".join(s.strip().replace("\n", end) + end + blank for s in sentences).encode())
    config = load_config(str(made(name, out=Path("tags.toml")).file))
    assert config.task.name == "token-classification" and config.data.labels == "LOC,PER"
    written = "".join(Path(f"tags-data/{split}{Path(name).suffix}").read_text() for split in ("train", "validation"))
    assert sorted(written.split("\n\n")) == sorted("".join(sentences).split("\n\n")[:-1] + [""])


def test_two_files_become_a_translation_run():
    for split, number in (("train", 60), ("val", 5), ("test", 5)):
        for side in ("en", "de"):
            Path(f"{split}.{side}").write_text("".join(f"{side} {i} dogs\n" for i in range(number)))
    config = load_config(str(made("train.en", "train.de").file))
    assert config.task.name == "translation" and config.model.family == "transformer"
    data = config.data
    assert (data.train_source, data.train_target) == ("train.en", "train.de")
    assert (data.validation_source, data.test_target) == ("val.en", "test.de")


def test_a_folder_is_read(tmp_path):
    (tmp_path / "texts").mkdir()
    write_csv("texts/my-train.csv", QUESTIONS)
    write_csv("texts/my-valid.csv", QUESTIONS[:4])
    assert load_config(str(made("texts", out=Path("a.toml")).file)).data.validation_source == "my-valid.csv"


def test_sizes_follow_the_packaged_recipes_and_what_the_devices_hold(tmp_path):
    write_csv("train.csv", QUESTIONS)
    guess = guess_task(read_own_text(["train.csv"]))
    from dataclasses import replace

    for name, number in (("trec6", 4952), ("toutiao", 27724)):
        tuned = load_config(name)
        chosen = {s.key: s.value for s in recipe(replace(guess, num_examples=number), "two-clusters")}
        assert chosen["model.family"] == tuned.model.family and chosen["optimizer.lr"] == tuned.optimizer.lr
        assert chosen["model.dropout"] == tuned.model.dropout and chosen["batch-size"] == tuned.batch_size
        assert tuned.num_rounds <= chosen["num-rounds"] <= 1.2 * tuned.num_rounds
    (tmp_path / "one.toml").write_text(
        'format = "collapipe-scenario/1"\nclusters = 2\ndevices = 1\n[device]\nmemory-gb = 0.4\n'
        "flop-per-cycle = 10.0\nfrequency-ghz = 0.5\n[block]\nmemory-gb = 0.375\n"
    )
    small = {s.key: s for s in recipe(guess, "one.toml")}
    assert small["model.encoder-layers"].value == 1 and "all that the devices hold" in small["model.width"].because


def test_a_pretrained_model_brings_family_and_tokenizer(tmp_path):
    write_csv("train.csv", QUESTIONS)
    guess = guess_task(read_own_text(["train.csv"]))
    (tmp_path / "model").mkdir()
    config = {"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 256, "max_position_embeddings": 512}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    chosen = {s.key: s.value for s in recipe(guess, "two-clusters", "model")}
    assert chosen["model.pretrained"] == str(tmp_path / "model") and chosen["optimizer.lr"] == 1e-4
    assert "model.width" not in chosen and chosen["model.max-length"] == 512
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))
    with pytest.raises(ValueError, match="two-clusters has room for 24 TEBs in a cluster, the model of model has 99"):
        recipe(guess, "two-clusters", "model")


@pytest.mark.parametrize(
    ("labels", "new_head"),
    [(["good", "bad"], True), (["a", "b", "c"], True), (["0", "1"], False), (["LABEL_1", "LABEL_0"], False)],
    ids=["names", "more", "numbers", "placeholders"],
)
def test_a_head_whose_classes_have_no_names_is_replaced_unless_the_labels_number_them(tmp_path, labels, new_head):
    from transformers import BertConfig, BertForSequenceClassification

    write_csv("train.csv", [(text, labels[i % len(labels)]) for i, (text, _) in enumerate(QUESTIONS)])
    tokenizer = train_wordpiece([text for text, _ in QUESTIONS], 400, False, True)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained("model")
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer.to_json())
    config = load_config(str(made("train.csv", pretrained="model", out=Path("unnamed.toml")).file))
    assert config.model.new_head is new_head


def write_texts(task):
    """Write a small data set of a task's kind; returns the arguments of ``collapipe init``."""
    if task == "translation":
        for side in ("en", "de"):
            Path(f"train.{side}").write_text("".join(f"{side} {i} dogs\n" for i in range(60)))
        return ["train.en", "train.de"], {}
    if task == "token-classification":
        Path("train.conll").write_text("Ada\tB-PER\nsleeps\tO\n\n" * 40)
        return ["train.conll"], {}
    if task == "sequence-classification":
        write_csv("train.csv", QUESTIONS)
        return ["train.csv"], {}
    Path("train.txt").write_text("".join(f"the dog {i} sees a cat\n" for i in range(60)))
    return ["train.txt"], {"task": task}


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("sequence-classification", "accuracy"),
        ("token-classification", "f1"),
        ("translation", "bleu"),
        ("masked-lm", "perplexity"),
        ("causal-lm", "perplexity"),
    ],
)
def test_the_best_model_by_the_score_of_the_task_is_kept(task, metric):
    sources, options = write_texts(task)
    config = load_config(str(made(*sources, **options).file))
    assert config.task.name == task
    assert (config.selection.load_best_at_end, config.selection.metric) == (True, metric)


def test_no_model_is_chosen_by_the_test_file():
    write_csv("train.csv", QUESTIONS)
    write_csv("test.csv", QUESTIONS[:6])
    config = load_config(str(made("train.csv").file))
    assert (config.data.validation_source, config.data.test_source) == ("", "test.csv")
    assert not config.selection.load_best_at_end
