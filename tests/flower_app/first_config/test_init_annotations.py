"""``collapipe init``: labels, tags and choices in forms that are easily taken for something else."""

from pathlib import Path

import pytest

from flower_app.config.sources import load_config
from helpers.command_line import init, write_rows

NUMBER = 60
TEXTS = [f"the {'red' if i % 3 else 'blue'} pump number {i} works" for i in range(NUMBER)]


pytestmark = pytest.mark.usefixtures("elsewhere")


def refused(told, *words):
    """Run the command; hold that it tells this in one line and writes nothing."""
    before = sorted(Path().iterdir())
    code, line = init(*words)
    assert code == 2 and told in line and "\n" not in line, line
    assert sorted(Path().iterdir()) == before


def write_table(name, row):
    write_rows(name, [row(i) for i in range(NUMBER)])


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("choice1, choice2", lambda i: {"premise": TEXTS[i], "choice1": TEXTS[-i], "choice2": "no", "label": i % 2}),
        ("option1, option2", lambda i: {"sentence": TEXTS[i], "option1": f"A{i}", "option2": f"B{i}", "answer": i % 2}),
        ("sol1, sol2", lambda i: {"goal": TEXTS[i], "sol1": f"a {i}", "sol2": f"b {i}", "label": i % 2}),
        (
            "question, A, B, C",
            lambda i: {"question": TEXTS[i], **{x: f"{x} {i}" for x in "ABCD"}, "answer": "ABCD"[i % 4]},
        ),
    ],
)
def test_choices_of_answers_are_no_pairs(columns, row):
    write_table(
        "train.csv",
        lambda i: {key: str(value) + ("" if key != "choice2" else f" {i}") for key, value in row(i).items()},
    )
    refused(f"multiple-choice data (columns {columns}): CollaPipe has no task for it yet", "train.csv")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("entities", lambda i: [[0, 3, "DET"]]),
        ("label", lambda i: f"intent {i % 25}"),
        ("score", lambda i: i * 37 % 97),
        ("score", lambda i: f"{i * 37 % 97}%"),
        ("labels", lambda i: f"{'B-X ' * (i % 7)}{'O ' * (i % 11)}B-X"),
    ],
    ids=["entities", "many", "numbers", "percent", "tags"],
)
def test_a_text_is_not_learned_alone_beside_its_annotations(name, row):
    write_table("train.jsonl", lambda i: {"text": TEXTS[i], name: row(i)})
    refused(f"the column {name} (such as ", "train.jsonl")
    code, told = init("train.jsonl", "--task", "masked-lm", "--text-column", "text")
    assert code == 0 and 'data.source-column = "text"' in told
    if "intent" in str(row(0)):
        code, told = init("train.jsonl", "--label-column", name, "--out", "classes.toml")
        assert code == 0 and f"25 different values in the column {name}" in told


@pytest.mark.parametrize(
    ("first", "second"), [("tokens", "ner_tags"), ("text", "labels"), ("messages", "source"), ("text", "label")]
)
def test_lists_that_were_written_as_text_are_named(first, second):
    lists = {"tokens", "ner_tags", "labels", "messages", "label"}
    write_table(
        "train.csv",
        lambda i: {name: [f"{TEXTS[i]} {name}"] if name in lists else "ab"[i % 2] for name in (first, second)},
    )
    refused("has lists that were written as text, such as \"['the ", "train.csv")


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        *(("yes", "no"), ("x", ""), ("1", "-1"), ("TRUE", "FALSE"), ("Y", "N"), ("1", "")),
        *(("T", "F"), ("on", "off"), ("1.00", "0.00"), ("+1", "-1")),
    ],
)
def test_columns_of_yes_and_no_are_no_classes_of_their_own(yes, no):
    write_table("train.csv", lambda i: {"text": TEXTS[i]} | {k: yes if i % 3 == j else no for j, k in enumerate("pqr")})
    refused("the columns p, q, r are one label, written as yes or no in each (one-hot)", "train.csv")


def test_usual_names_of_labels_win_over_columns_with_fewer_values():
    rows = {"annotator_labels": ["no"], "genre": "fiction", "sentence2": "a", "sentence1": "b"}
    write_table(
        "train.jsonl",
        lambda i: (
            rows
            | {"annotator_labels": ["no"] * (1 + i % 2), "genre": "xy"[i % 2], "gold_label": "abc"[i % 3]}
            | {"sentence1": TEXTS[i], "sentence2": TEXTS[-i]}
        ),
    )
    code, told = init("train.jsonl")
    assert code == 0 and 'data.label-column = "gold_label"' in told and 'data.pair-column = "sentence2"' in told


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("mem.tmx", "<seg>{}</seg>", "files .tmx are not read; write its texts as CSV or JSON lines"),
        ("reviews.XML", "<t>{}</t>", "files .xml are not read"),
        ("page.html", "<p>{}</p>", "files .html are not read"),
        ("talk.srt", "{}", "files .srt are not read"),
        ("data.yaml", "- text: {}", "files .yaml are not read"),
        ("reviews.txt", "<?xml version='1.0'?><t>{}</t>", "found XML or HTML, expected a text a line"),
        ("sst.txt", "1 {}", "found a label before each text"),
        ("trec.txt", "DESC:manner {}", "found a label before each text"),
        ("signs.txt", "+1 {}", "found a label before each text"),
    ],
)
def test_marked_up_and_labelled_lines_are_no_texts(name, line, told):
    other = line.replace("1 ", "0 ").replace("DESC:manner", "HUM:ind")
    Path(name).write_text("".join((line if i % 2 else other).format(text) + "\n" for i, text in enumerate(TEXTS)))
    refused(told, name)


def test_nothing_is_left_behind_where_the_runs_own_check_refuses(monkeypatch):
    from flower_app.tasks.classification import ClassificationTask

    def interrupted(*_):
        raise KeyboardInterrupt

    write_table("train.csv", lambda i: {"text": TEXTS[i], "label": "ab"[i % 2]})
    monkeypatch.setattr(ClassificationTask, "prepare", interrupted)
    init("train.csv")
    assert [path.name for path in Path().iterdir()] == ["train.csv"]


def test_a_type_of_tags_is_listed_in_one_spelling():
    kinds = ("\u00e9t\u00e9", "e\u0301te\u0301")
    write_table("train.jsonl", lambda i: {"tokens": TEXTS[i].split(), "tags": ["O"] * 5 + [f"B-{kinds[i % 2]}"]})
    assert init("train.jsonl")[0] == 0
    assert load_config("collapipe.toml").data.labels == "\u00e9t\u00e9"
