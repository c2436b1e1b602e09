"""``collapipe predict --file in.csv --out out.csv``."""

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flower_app import Run
from flower_app.cli.main import app
from flower_app.prediction_file import read_question_rows, read_text_rows, write_predictions
from flower_app.tasks import chat_template
from helpers.chat_cases import rendered_here
from helpers.saved_runs import SMALL, saved_run


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


pytestmark = pytest.mark.usefixtures("elsewhere")


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
        ("in.txt", "a dog\na cat\n", ""),
        ("in.txt", "a dog\r\na cat\r\n\r\n", ""),
        ("in.txt", "a dog\ra cat\r", ""),
        ("in.txt", "\ufeffa dog\n\ufeffa cat", ""),
    ],
)
def test_formats_keep_their_other_columns(name, text, column):
    Path(name).write_text(text, "utf-8", newline="")
    rows = read_text_rows(Path(name), column)
    assert [given if isinstance(given, str) else " ".join(given) for given in rows.inputs] == ["a dog", "a cat"]
    for ending in (".csv", ".tsv", ".jsonl", ".txt"):
        write_predictions(Path(f"out{ending}"), rows, ["D", "C"])
    assert Path("out.txt").read_text() == "D\nC\n"
    assert [json.loads(line)["prediction"] for line in Path("out.jsonl").read_text().splitlines()] == ["D", "C"]
    lines = Path("out.tsv").read_text().splitlines()
    assert len(lines) == 2 + rows.header and lines[-1].endswith("\tC")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"id": 3}', "none; write one, or remove the row"),
        ('{"text": [null, ""]}', "none; write one, or remove the row"),
        ('{"text": 1e400}', "none; write one, or remove the row"),
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


def test_a_blank_line_of_a_text_file_is_refused_by_its_line():
    Path("in.txt").write_text("a dog\n\n \na cat\n")
    with pytest.raises(ValueError, match=r"--file: in\.txt, line 2: expected a text in the column 'text', found none"):
        read_text_rows(Path("in.txt"))


def test_a_cell_with_a_carriage_return_is_read_as_it_was_written():
    Path("in.csv").write_bytes(b'id,text\n1,"a\rdog, ""so"""\n')
    rows = read_text_rows(Path("in.csv"))
    write_predictions(Path("out.csv"), rows, ["D"])
    again = read_text_rows(Path("out.csv"), "text")
    assert again.rows == [{"id": "1", "text": 'a\rdog, "so"', "prediction": "D"}]
    assert Path("out.csv").read_bytes().count(b"\n") == 2


def test_values_of_other_columns_are_written_as_json_has_them():
    Path("in.jsonl").write_text(
        '{"text": "a", "x": null, "y": ["ä", null], "z": {"k": true}, "w": [1e400, NaN]}', "utf-8"
    )
    rows = read_text_rows(Path("in.jsonl"))
    for ending in (".jsonl", ".csv", ".tsv"):
        write_predictions(Path(f"out{ending}"), rows, ["D"])
    expected = {"text": "a", "x": None, "y": ["ä", None], "z": {"k": True}, "w": [None, None], "prediction": "D"}
    assert json.loads(Path("out.jsonl").read_text(), parse_constant=pytest.fail) == expected
    cells = ["a", "", '["ä", null]', '{"k": true}', "[null, null]", "D"]
    assert next(csv.DictReader(open("out.csv"))) == dict(zip(expected, cells, strict=True))
    assert Path("out.tsv").read_text().splitlines()[1].split("\t") == cells


def test_words_of_a_table_are_tagged_as_they_stand():
    run = saved_run({**SMALL, "model.family": "bert", "task.name": "token-classification"})
    Path("in.jsonl").write_text(
        '{"tokens": ["The", "U.S.", "can\'t", "e-mail"]}\n{"tokens": "U.S. 10\u00a0000 e-mail"}\n'
    )
    result = call("predict", run, "--file", "in.jsonl", "--out", "out.jsonl")
    assert result.exit_code == 0, result.stderr
    words, text = (json.loads(line)["prediction"].split(" ") for line in Path("out.jsonl").read_text().splitlines())
    assert [word.rpartition("/")[0] for word in words] == ["The", "U.S.", "can't", "e-mail"]
    assert [word.rpartition("/")[0] for word in text] == ["U.S.", "10\u00a0000", "e-mail"]
    # A column of another name has texts, whose words end at punctuation.
    Path("in.csv").write_text("text\nU.S. e-mail\n")
    assert call("predict", run, "--file", "in.csv", "--out", "out.csv").exit_code == 0
    assert len(next(csv.DictReader(open("out.csv")))["prediction"].split(" ")) > 2


CLASSES = {**SMALL, "model.family": "bert", "task.name": "sequence-classification"}


def library_softmax(run, texts):
    """Probabilities of the exported model by the transformers library alone, by label."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    Run(run).export("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")
    model = AutoModelForSequenceClassification.from_pretrained("exported").eval()
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    return [dict(zip(model.config.id2label.values(), row.softmax(-1).tolist(), strict=True)) for row in logits]


def test_probabilities_are_the_librarys_softmax_of_the_exported_model():
    run, texts = saved_run(CLASSES), ["a dog, and a cat", "the dog"]
    Path("in.csv").write_text('id,p_ANIMAL,text\n7,old,"a dog, and a cat"\n8,old,the dog\n')
    results = [
        call("predict", run, *given, "--proba", "--json") for given in (texts, ["--file", "in.csv", "--out", "o.csv"])
    ]
    assert [result.exit_code for result in results] == [0, 0], results[0].output
    expected = library_softmax(run, texts)
    printed = json.loads(results[0].stdout)
    assert printed["probabilities"] == [pytest.approx(by_label, rel=1e-5) for by_label in expected]
    assert printed["predictions"] == [max(by_label, key=by_label.get) for by_label in expected]
    assert printed["probabilities"] == Run(run).predict(texts, proba=True)
    assert printed["probabilities"][1] == pytest.approx(Run(run).predict("the dog", proba=True), rel=1e-5)
    assert [sum(by_label.values()) for by_label in printed["probabilities"]] == pytest.approx([1, 1], abs=1e-12)
    rows = list(csv.DictReader(open("o.csv")))
    columns = [f"p_{label}" for label in printed["probabilities"][0]]
    assert list(rows[0]) == ["id", "text", "prediction", *columns]
    for row, by_label, label in zip(rows, printed["probabilities"], printed["predictions"], strict=True):
        assert row["prediction"] == label == call("predict", run, row["text"]).stdout.strip()
        assert {f"p_{name}": value for name, value in by_label.items()} == {c: float(row[c]) for c in columns}
    line = call("predict", run, "--proba", "the dog").stdout.strip().split("\t")
    assert line[0] == printed["predictions"][1] and [cell.partition("=")[0] for cell in line[1:]] == columns


@pytest.mark.parametrize(
    "keys",
    [
        {**CLASSES, "task.name": "token-classification"},
        SMALL,
        {**CLASSES, "task.name": "masked-lm"},
        {**SMALL, "model.family": "gpt2", "task.name": "causal-lm"},
    ],
    ids=lambda keys: keys.get("task.name", "translation"),
)
def test_probabilities_are_refused_where_a_text_has_no_single_label(keys):
    run = saved_run(keys)
    result = call("predict", run, "a dog", "--proba")
    name = keys.get("task.name", "translation")
    assert f"proba: expected a run of sequence-classification, found {name}" in result.stderr
    assert result.exit_code == 2 and result.stdout == ""


def test_a_text_file_has_no_place_for_probabilities():
    Path("in.txt").write_text("a dog\n")
    result = call("predict", saved_run(CLASSES), "--file", "in.txt", "--out", "out.txt", "--proba")
    assert "error: --out: out.txt: a text file has no columns for --proba; write a .csv" in result.stderr
    assert result.exit_code == 2 and not Path("out.txt").exists()


@pytest.mark.parametrize("name", ["in.csv", "./in.csv", "link.csv", "hard.csv"])
def test_predictions_are_not_written_over_their_own_input(name):
    text = "id,text\n7,a dog\n"
    Path("in.csv").write_text(text)
    Path("link.csv").symlink_to("in.csv")
    Path("hard.csv").hardlink_to("in.csv")
    result = call("predict", "no-run", "--file", "in.csv", "--out", name)
    assert Path("in.csv").read_text() == text
    assert (result.exit_code, result.stderr.splitlines()) == (
        2,
        [f"error: --out: {Path(name)}: is the file that is read, in.csv; name another, for it would be lost"],
    )


def test_predictions_are_not_written_over_the_records_of_their_run():
    """`.jsonl` is a format of predictions, and of a run's rounds."""
    Path("in.txt").write_text("a dog\n")
    run = saved_run(CLASSES)
    rounds = Path(run) / "rounds.jsonl"
    rounds.write_text('{"round": 1}\n')
    result = call("predict", run, "--file", "in.txt", "--out", rounds)
    assert result.exit_code == 2 and "rounds.jsonl: is the file that is read" in result.stderr
    assert rounds.read_text() == '{"round": 1}\n'


def test_a_plan_and_a_profile_are_not_written_over_what_they_are_made_from():
    plan, measured = Path("plan.json"), Path("measured.toml")
    written = call("plan", "--scenario", "table2", "--planner", "uniform", "--write-plan", plan)
    assert written.exit_code == 0, written.stderr
    measured.write_text("{}")
    before = plan.read_bytes()
    again = call("plan", "--scenario", "table2", "--plan", plan, "--write-plan", plan)
    profiled = call("profile", "--measured", measured, "--out", measured)
    assert plan.read_bytes() == before and measured.read_text() == "{}"
    for result, option in ((again, "--write-plan"), (profiled, "--out")):
        assert result.exit_code == 2 and f"{option}: " in result.stderr and "is the file that is read" in result.stderr


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}, ["Who?"]),
        ({"prompt": "Who?", "completion": "I."}, ["Who?"]),
        ({"instruction": "Who?", "input": "It barks."}, ["Who?\n\nIt barks."]),
        ({"system": "Be brief.", "question": "Who?", "answer": None}, ["Be brief.", "Who?"]),
    ],
)
def test_questions_of_a_file_are_read_without_their_answers(elsewhere, row, expected):
    Path("in.jsonl").write_text(json.dumps(row))
    rows = read_question_rows(Path("in.jsonl"), "", "")
    assert [[message["content"] for message in messages] for messages in rows.inputs] == [expected]
    assert rows.rows == [row]


def test_a_file_without_questions_is_refused(elsewhere):
    Path("in.csv").write_text("id,number\n1,2\n")
    with pytest.raises(ValueError, match="expected a column of messages or questions, found id, number; name it with"):
        read_question_rows(Path("in.csv"), "", "")
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r"--file: in\.jsonl, line 2, message 1: the question is empty"):
        read_question_rows(Path("in.jsonl"), "", "")


def test_questions_are_answered_from_the_command_line_from_files_and_from_python(elsewhere, monkeypatch):
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)
    talk = [{"role": "user", "content": "who reads?"}, {"role": "assistant", "content": "the king"}]
    Path("train.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    keys = {"model.family": "gpt2", "task.name": "instruction", "task.chat-template": "chatml"}
    files = {"data.source": "files", "data.train-source": "train.jsonl", "data.test-source": "train.jsonl"}
    run = saved_run(SMALL | keys | files | {"task.max-new-tokens": 4})
    printed = json.loads(call("predict", run, "who reads?", json.dumps(talk[:1]), "--json").stdout)
    answer = printed["predictions"][0]
    assert answer == printed["predictions"][1] == Run(run).predict("who reads?") == Run(run).predict(talk[:1])
    assert Run(run).predict([talk[:1], "who reads?"]) == [answer, answer]
    result = call("predict", run, "--file", "train.jsonl", "--out", "out.jsonl")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert rows == [{"messages": talk, "prediction": answer}] * 20
    drawn = call("predict", run, "who reads?", "--set", "task.temperature=9", "--set", "task.top-p=0.99")
    assert drawn.exit_code == 0, drawn.stderr
    assert call("predict", run, json.dumps(talk)).exit_code == 2
