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
    assert rows.texts == ["a dog", "a cat"]
    for ending in (".csv", ".tsv", ".jsonl", ".txt"):
        write_predictions(Path(f"out{ending}"), rows, ["D", "C"])
    assert Path("out.txt").read_text() == "D\nC\n"
    assert [json.loads(line)["prediction"] for line in Path("out.jsonl").read_text().splitlines()] == ["D", "C"]
    lines = Path("out.tsv").read_text().splitlines()
    assert len(lines) == 2 + rows.header and lines[-1].endswith("\tC")
