"""``collapipe init``: data that no task learns from is named and refused; nothing is taken for the nearest task."""

import json
from pathlib import Path

import pytest

from helpers.command_line import init, write_rows

TEXTS = [f"the {'red' if i % 3 else 'blue'} pump number {i} works" for i in range(40)]
NO_TASK = "CollaPipe has no task for it yet"


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(
    ("kind", "columns", "row"),
    [
        (
            "preference data",
            "chosen, rejected",
            lambda i: {"prompt": TEXTS[i], "chosen": f"yes {i} it is", "rejected": f"no {i} it is"},
        ),
        (
            "question answering data",
            "question, context, answers.answer_start",
            lambda i: {
                "context": TEXTS[i],
                "question": f"what is {i} there",
                "answers": {"text": ["a"], "answer_start": [0]},
            },
        ),
        (
            "multiple-choice data",
            "question, choices",
            lambda i: {"question": TEXTS[i], "choices": ["a", "b"], "answer": i % 2},
        ),
        ("summaries", "article, highlights", lambda i: {"article": 5 * TEXTS[i], "highlights": TEXTS[i]}),
    ],
)
def test_data_without_a_task_is_refused_by_its_kind(kind, columns, row):
    write_rows("train.jsonl", list(map(row, range(40))))
    code, told = init("train.jsonl")
    assert (code, told.count("\n")) == (2, 0), told
    assert told.startswith(f"error: {kind} (column") and f" {columns}): {NO_TASK}; " in told
    assert [path.name for path in Path().iterdir()] == ["train.jsonl"]


def test_of_two_columns_of_texts_none_is_learned_alone():
    write_rows("train.jsonl", [{"headline": text, "abstract": f"{text} {text}"} for text in TEXTS])
    code, told = init("train.jsonl")
    assert code == 2 and "several columns of texts (headline, abstract)" in told and "--text-column" in told
    write_rows("named.jsonl", [{"title": text, "text": f"{text} {text}", "id": i} for i, text in enumerate(TEXTS)])
    assert 'data.source-column = "text"' in init("named.jsonl")[1]


@pytest.mark.parametrize("labels", [lambda i: [["a"], ["a", "b"]][i % 2], lambda i: [i % 2, 1]])
def test_several_labels_of_a_text_are_refused_and_nothing_is_written(labels):
    write_rows("train.jsonl", [{"text": text, "labels": labels(i)} for i, text in enumerate(TEXTS)])
    code, told = init("train.jsonl")
    assert (code, told.count("\n")) == (2, 0) and "expected one label in each row" in told
    assert not Path("collapipe.toml").exists()


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("SMSSpamCollection", "ham\t{}", "as many tabs in each line, as in a table, expected a text a line; rename it"),
        ("train.txt", "{};joy", "as many semicolons in each line"),
        ("train.txt", "{}|joy", "as many vertical bars in each line"),
        ("train.txt", "__label__joy {}", "found labels before the texts (fastText)"),
        ("train.txt", '{{"text": "{}"}}', "found JSON, expected a text a line; rename it to train.jsonl"),
        ("corpus", '["{}"]', "found JSON, expected a text a line"),
    ],
)
def test_lines_of_a_table_are_no_texts(name, line, expected):
    Path(name).write_text("".join(f"{line.format(text)}\n" for text in TEXTS))
    code, told = init(f"./{name}")
    assert code == 2 and expected in told


def test_nested_questions_are_refused_too():
    Path("squad.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": TEXTS[0], "qas": []}]}]}))
    code, told = init("squad.json")
    assert code == 2 and "question answering data (SQuAD" in told


@pytest.mark.parametrize("task", ["masked-lm", "causal-lm"])
def test_a_named_task_does_not_make_it_learn_one_column_alone(task):
    write_rows("train.jsonl", [{"prompt": text, "completion": f" {text}"} for text in TEXTS])
    assert init("train.jsonl", "--task", task)[0] == 2
    # A named column is what the person means.
    code, told = init("train.jsonl", "--task", task, "--text-column", "prompt")
    assert code == 0 and 'data.source-column = "prompt"' in told


def test_a_prompt_with_few_answers_is_a_text_with_its_class():
    write_rows(
        "train.jsonl", [{"prompt": text, "completion": " yes" if i % 2 else " no"} for i, text in enumerate(TEXTS)]
    )
    code, told = init("train.jsonl")
    assert code == 0 and 'data.labels = "no,yes"' in told and 'data.source-column = "prompt"' in told


@pytest.mark.parametrize("tags", [("B-PER", "O"), ("S-PER", "O"), ("PROPN", "VERB")])
def test_lines_of_tagged_words_are_no_texts(tags):
    sentence = f"# id 7\nAda {tags[0]}\nsleeps {tags[1]}\n\n"
    Path("train.txt").write_text(sentence * 30)
    code, told = init("train.txt")
    assert "masked-lm" not in told
    assert (code == 0 and "task: token-classification" in told) if tags[1] == "O" else code == 2, told


def test_numbered_tags_of_a_parquet_file_have_their_names_when_some_are_set_aside():
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags})
    rows = {"tokens": [["Ada", "Bell", "sings"]] * 40, "ner_tags": [[1, 2, 0]] * 40}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet("train.parquet")
    code, told = init("train.parquet")
    assert code == 0 and 'data.labels = "PER"' in told, told
    table.to_parquet("test.parquet")
    code, told = init("train.parquet", "--out", "two.toml")
    assert code == 0 and 'data.test-source = "test.parquet"' in told, told


def test_parallel_tables_are_no_parallel_text():
    for name in ("train.csv", "test.csv"):
        Path(name).write_text("text,label\n" + "".join(f"{text},{'ab'[i % 2]}\n" for i, text in enumerate(TEXTS)))
    code, told = init("train.csv", "test.csv")
    assert code == 2 and "name the training file itself, others by --validation and --test" in told


def test_tagged_words_need_an_ending_that_a_run_reads():
    Path("words").write_text("Ada\tB-PER\nsleeps\tO\n\n" * 30)
    code, told = init("./words")
    assert code == 2 and "found a word and its tag on each line; expected the ending .conll, rename it" in told
    assert init("./words", "--out", "words.toml")[0] == 2


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
@pytest.mark.parametrize("columns", [("tokens", "tags"), ("sentence", "labels"), ("words", "ner")])
@pytest.mark.parametrize("task", [[], ["--task", "token-classification"]])
def test_words_and_tags_between_blanks_are_tagged_words(name, columns, task):
    texts = ("The U.S. 10\u00a0000 can't e-mail", "Ada sings")
    tags = ("O B-LOC S-QTY O O", "B-PER O")
    write_rows(name, [{"id": str(i), columns[0]: texts[i % 2], columns[1]: tags[i % 2]} for i in range(40)])
    code, told = init(name, *task)
    assert code == 0 and f"words and tags between blanks in the columns {' and '.join(columns)}" in told, told
    assert 'data.labels = "LOC,PER,QTY"' in told


def test_a_task_of_tags_takes_no_other_columns():
    write_rows("train.csv", [{"tokens": "Ada sings here" if i % 2 else "Ada", "tags": "B-PER O"} for i in range(40)])
    code, told = init("train.csv", "--task", "token-classification")
    assert code == 2 and "expected a column of words and one of as many tags, found tokens, tags; name them" in told
    code, told = init(
        "train.csv", "--task", "token-classification", "--text-column", "tokens", "--label-column", "tags"
    )
    assert code == 2 and "train.csv, line 2: 1 tokens have 2 tags" in told, told


def test_one_class_alone_is_refused_by_its_column():
    write_rows("train.csv", [{"text": text, "label": "red"} for text in TEXTS])
    for words in ([], ["--task", "sequence-classification"], ["--label-column", "label"]):
        code, told = init("train.csv", *words)
        assert code == 2 and "the column label has one class alone, 'red'; expected two or more" in told, told


@pytest.mark.parametrize("names", [("rt-polarity.pos", "rt-polarity.neg"), ("neg.txt", "pos.txt"), ("ham", "spam")])
def test_texts_of_two_classes_are_no_translation(names):
    for name in names:
        Path(name).write_text("".join(f"{text} {name}\n" for text in TEXTS))
    code, told = init(*(f"./{name}" for name in names))
    assert code == 2 and "found texts of two classes by their names" in told, told


@pytest.mark.parametrize("number", ["-1", "0.5", "1,5", "7", "50%"])
def test_numbers_are_no_second_texts(number):
    rows = [{"sentence1": text, "sentence2": number, "label": "ab"[i % 2]} for i, text in enumerate(TEXTS)]
    write_rows("train.jsonl", rows)
    code, told = init("train.jsonl")
    assert code == 0 and "not used: sentence2" in told, told
    write_rows("train.jsonl", [row | {"sentence2": i / 2} for i, row in enumerate(rows)])
    code, told = init("train.jsonl", "--pair-column", "sentence2", "--text-column", "sentence1", "--out", "two.toml")
    assert code == 2 and "train.jsonl, line 1: expected a text, found the number 0.0; name a column of texts" in told
