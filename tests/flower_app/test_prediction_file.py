"""``collapipe predict --file in.csv --out out.csv``."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.prediction_file import read_text_rows, write_predictions
from helpers.saved_runs import SMALL, saved_run


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_row_of_a_table_gets_a_prediction():
    run = saved_run({**SMALL, "model.family": "bert", "task.name": "sequence-classification"})
    Path("in.csv").write_text('id,text\n7,"a dog, and a cat"\n8,the dog sleeps\n')
    result = call("predict", run, "--file", "in.csv", "--out", "out.csv", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"out": "out.csv", "rows": 2}
    rows = list(csv.DictReader(open("out.csv")))
    assert [(row["id"], row["text"]) for row in rows] == [("7", "a dog, and a cat"), ("8", "the dog sleeps")]
    alone = call("predict", run, "a dog, and a cat", "the dog sleeps").stdout.splitlines()
    assert [row["prediction"] for row in rows] == alone


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("in.tsv", "id\ttext\n7\ta dog\n8\ta cat\n", ""),
        ("in.tsv", "7\ta dog\n8\ta cat\n", "1"),
        ("in.jsonl", '{"id": 7, "text": "a dog"}\n{"id": 8, "text": "a cat"}\n', ""),
        ("in.jsonl", '{"id": 7, "words": ["a", "dog"]}\n{"id": 8, "words": ["a", "cat"]}\n', "words"),
        ("in.txt", "a dog\n\na cat\n", ""),
    ],
)
def test_formats_keep_their_other_columns(name, text, column):
    Path(name).write_text(text)
    rows = read_text_rows(Path(name), column)
    assert [given if isinstance(given, str) else " ".join(given) for given in rows.inputs] == ["a dog", "a cat"]
    for ending in (".csv", ".tsv", ".jsonl", ".txt"):
        write_predictions(Path(f"out{ending}"), rows, ["D", "C"])
    assert Path("out.txt").read_text() == "D\nC\n"
    assert [json.loads(line)["prediction"] for line in Path("out.jsonl").read_text().splitlines()] == ["D", "C"]
    lines = Path("out.tsv").read_text().splitlines()
    assert len(lines) == 2 + rows.header and lines[-1].endswith("\tC")


def test_cells_stay_below_their_names_whatever_keys_a_row_has_and_in_which_order():
    Path("in.jsonl").write_text('{"text": "a dog", "id": 1}\n{"id": 2, "text": "a cat"}\n{"text": "b", "more": "m"}\n')
    rows = read_text_rows(Path("in.jsonl"))
    for ending, delimiter in ((".csv", ","), (".tsv", "\t")):
        write_predictions(Path(f"out{ending}"), rows, ["D", "C", "B"])
        assert list(csv.reader(open(f"out{ending}"), delimiter=delimiter)) == [
            ["text", "id", "more", "prediction"],
            ["a dog", "1", "", "D"],
            ["a cat", "2", "", "C"],
            ["b", "", "m", "B"],
        ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"id": 3}', "none; write one, or remove the row"),
        ('{"text": [null, ""]}', "none; write one, or remove the row"),
        ('{"text": ["a", null]}', "a list with an empty word; remove the word"),
        ('{"text": ["a", ["b"]]}', r"\['b'\]; name a column of texts with --column"),
        ('{"text": {"en": "a"}}', r"\{'en': 'a'\}; name a column of texts with --column"),
    ],
)
def test_a_row_without_a_text_is_named_by_its_line(row, problem):
    Path("in.jsonl").write_text(f'{{"text": "a dog"}}\n\n{row}\n')
    expected = rf"--file: in\.jsonl, line 3: expected a text in the column 'text', found {problem}$"
    with pytest.raises(ValueError, match=expected):
        read_text_rows(Path("in.jsonl"))


def test_numbers_are_texts_and_words():
    Path("in.jsonl").write_text('{"text": 0}\n{"text": [1, "two"]}\n')
    assert read_text_rows(Path("in.jsonl")).inputs == ["0", ["1", "two"]]


def test_a_text_file_has_a_line_for_each_row():
    Path("in.txt").write_text("a\nb\n")
    write_predictions(Path("out.txt"), read_text_rows(Path("in.txt")), ["A\nB", "C"])
    assert Path("out.txt").read_text() == "A B\nC\n"


def test_a_cell_with_a_carriage_return_is_read_as_it_was_written():
    Path("in.csv").write_bytes(b'id,text\n1,"a\rdog, ""so"""\n')
    rows = read_text_rows(Path("in.csv"))
    write_predictions(Path("out.csv"), rows, ["D"])
    again = read_text_rows(Path("out.csv"), "text")
    assert again.rows == [{"id": "1", "text": 'a\rdog, "so"', "prediction": "D"}]
    assert Path("out.csv").read_bytes().count(b"\n") == 2


def test_words_of_a_table_are_tagged_as_they_stand():
    run = saved_run({**SMALL, "model.family": "bert", "task.name": "token-classification"})
    Path("in.jsonl").write_text('{"tokens": ["The", "U.S.", "can\'t", "e-mail"]}\n{"tokens": "U.S. e-mail"}\n')
    result = call("predict", run, "--file", "in.jsonl", "--out", "out.jsonl")
    assert result.exit_code == 0, result.stderr
    words, text = (json.loads(line)["prediction"].split(" ") for line in Path("out.jsonl").read_text().splitlines())
    assert [word.rpartition("/")[0] for word in words] == ["The", "U.S.", "can't", "e-mail"]
    assert len(text) > 2
