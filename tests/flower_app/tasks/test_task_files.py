"""Files that a run reads: endings, encodings, marks between cells, shards, spellings of labels, blanks."""

import csv
import gzip
import json

import pytest

from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig, count_files
from flower_app.tasks.data.data_split import training_shares
from flower_app.tasks.plain_text import load_text
from helpers.task_cases import options

ROWS = [(f"the pump {i}, 0,5 bar", "ab"[i % 2]) for i in range(8)]


def config(folder, name, **changes):
    base = {"source": "files", "path": str(folder), "train_source": name, "test_source": name, "max_length": 40}
    return DataConfig(**{**base, **changes})


def read(name, data):
    """Rows of the training split; or what is told of its mistake."""
    try:
        examples = task(TaskConfig(name=name)).read(data, "train", None)
    except ValueError as error:
        return str(error)
    return list(zip(examples.inputs, examples.labels, strict=True))


def texts(data):
    """Texts of a language model; or what is told of a mistake."""
    try:
        return list(load_text(data, "train", seed=0).texts)
    except ValueError as error:
        return str(error)


def write_cells(path, rows=ROWS, **dialect):
    with path.open("w", newline="", encoding=dialect.pop("encoding", "utf-8")) as file:
        csv.writer(file, **dialect).writerows([("text", "label"), *rows])


def write_objects(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("train.CSV", {}),
        ("train.csv", {"delimiter": ";"}),
        ("train.csv", {"delimiter": "\t"}),
        ("train.csv", {"delimiter": "|", "quoting": csv.QUOTE_ALL}),
        ("train.tsv", {"delimiter": "\t", "quoting": csv.QUOTE_ALL}),
        ("train.TSV", {"delimiter": "\t"}),
        ("train.csv", {"encoding": "utf-16"}),
        ("train.csv", {"encoding": "utf-8-sig", "delimiter": ";"}),
    ],
)
def test_a_run_reads_what_spreadsheets_write(tmp_path, name, dialect):
    rows = [*ROWS, ('He said "no",\nand left', "a")]
    write_cells(tmp_path / name, rows, **dialect)
    assert read("sequence-classification", config(tmp_path, name)) == rows


@pytest.mark.parametrize("name", ["train.ndjson", "train.json", "train.jsonl.gz", "TRAIN.JSONL"])
def test_a_run_reads_json_under_each_of_its_endings(tmp_path, name):
    rows = [{"text": text, "label": label} for text, label in ROWS]
    data = json.dumps(rows) if name == "train.json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(data.encode()) if name.endswith("gz") else data.encode())
    assert read("sequence-classification", config(tmp_path, name)) == ROWS
    assert texts(config(tmp_path, name)) == [text for text, _ in ROWS]


@pytest.mark.parametrize("name", ["train.xlsx", "train.zip", "train.pdf"])
@pytest.mark.parametrize("kind", ["sequence-classification", "masked-lm", "token-classification"])
def test_a_run_refuses_a_format_by_its_name(tmp_path, name, kind):
    (tmp_path / name).write_text("text\n")
    with pytest.raises(ValueError, match=rf"data\.train-source: .*{name}: files \.{name[6:]} are not read; \w+"):
        task(TaskConfig(name=kind)).check(config(tmp_path, name), options(), 0, 1)


def test_a_broken_row_is_told_by_its_line_whatever_the_mark(tmp_path):
    write_cells(tmp_path / "train.csv", [*ROWS, *ROWS, ("only a text",)], delimiter=";")
    message = read("sequence-classification", config(tmp_path, "train.csv"))
    assert message.endswith("train.csv, line 18: expected 2 columns, found 1")
    write_cells(tmp_path / "train.csv", ROWS, delimiter=";")
    with (tmp_path / "train.csv").open("a") as file:
        file.write('"open;a\n')
    message = read("sequence-classification", config(tmp_path, "train.csv"))
    assert "line 10: expected cells separated by semicolons" in message


@pytest.mark.parametrize("name", ["data/train-*.csv", "data/train-*-of-*.csv", "*/train-0000*"])
def test_a_star_stands_for_all_shards_and_places_name_theirs(tmp_path, name):
    (tmp_path / "data").mkdir()
    for shard in range(3):
        write_cells(tmp_path / "data" / f"train-0000{shard}-of-00003.csv", ROWS[shard::3])
    name = name if name.endswith("csv") else f"{name}.csv"
    expected = [row for shard in range(3) for row in ROWS[shard::3]]
    assert read("sequence-classification", config(tmp_path, name)) == expected
    assert texts(config(tmp_path, name)) == [text for text, _ in expected]
    write_cells(tmp_path / "data" / "train-00001-of-00003.csv", [("a text", "a"), ("", "b")])
    message = read("sequence-classification", config(tmp_path, name))
    assert "train-00001-of-00003.csv, line 3: the text is empty" in message
    (tmp_path / "data" / "train-00002-of-00003.csv").unlink()
    assert "expected 3 shards, found 2" in read("sequence-classification", config(tmp_path, name))


def test_shards_of_text_of_tags_and_of_each_cluster(tmp_path):
    for shard in range(2):
        (tmp_path / f"train-{shard}.txt").write_text(f"text {shard}\n")
        (tmp_path / f"train-{shard}.conll").write_text(f"Ada\tB-PER\nsleeps\tO\n\nword{shard}\tO")
        for cluster in range(2):
            write_cells(tmp_path / f"train-{cluster}-part{shard}.csv", ROWS[:2])
    assert texts(config(tmp_path, "train-*.txt")) == ["text 0", "text 1"]
    sentences = [words for words, _ in read("token-classification", config(tmp_path, "train-*.conll"))]
    assert sentences == [["Ada", "sleeps"], ["word0"], ["Ada", "sleeps"], ["word1"]]
    data = config(
        tmp_path, "train-{cluster}-part*.csv", partition="files", labels="a,b", test_source="train-0-part0.csv"
    )
    assert count_files(data) == 2
    load = task(TaskConfig(name="sequence-classification")).read
    _, sizes = training_shares(data, lambda cluster: load(data, "train", cluster), 2, 0)
    assert sizes == (4, 4)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, "1", 1.0, True, 0, False], ["1", "1", "1", "1", "0", "0"]),
        (["1.0", "1", "TRUE", "0"], ["1", "1", "1", "0"]),
        ([True, "true", "TRUE", False], ["TRUE", "TRUE", "TRUE", "False"]),
        (["+1", "1", "-1", "0", "1."], ["1", "1", "-1", "0", "1"]),
        (["\u00e9t\u00e9", "e\u0301te\u0301", "ete"], ["\u00e9t\u00e9", "\u00e9t\u00e9", "ete"]),
        (["very good", "very  good", "good"], ["very good", "very good", "good"]),
        (["go\u200bod", "go\u00adod", "good", "\ufeffgood", "so so", "so\u00a0so"], ["good"] * 4 + ["so so"] * 2),
        # Beyond what a float tells apart.
        ([12345678901234567, 12345678901234568, "12345678901234567.0"], [f"1234567890123456{i}" for i in (7, 8, 7)]),
        # Alike in one way alone, they stay as they are.
        ([1.0, 0.0, 1.0], ["1.0", "0.0", "1.0"]),
        ([True, False, True], ["True", "False", "True"]),
        (["01", "1", "007", "7"], ["01", "1", "007", "7"]),
    ],
)
def test_one_value_has_one_spelling(tmp_path, values, labels):
    write_objects(tmp_path / "train.jsonl", [{"text": "a text", "label": value} for value in values])
    found = read("sequence-classification", config(tmp_path, "train.jsonl"))
    assert [label for _, label in found] == labels
    shared = load_text(config(tmp_path, "train.jsonl", label_column="label"), "train", seed=0)
    assert list(shared.labels) == labels


@pytest.mark.parametrize("value", ["NaN", '"nan"', '"NaN"', "Infinity", "1e400", "-1e400", '"inf"'])
@pytest.mark.parametrize("kind", ["sequence-classification", "masked-lm"])
def test_a_label_that_is_missing_is_refused_by_its_line(tmp_path, value, kind):
    lines = ['{"text": "a", "label": "x"}', '{"text": "b", "label": "y"}', f'{{"text": "c", "label": {value}}}']
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    data = config(tmp_path, "train.jsonl", label_column="label", partition="natural-id")
    with pytest.raises(ValueError, match=r"data\.label-column: .*train\.jsonl, line 3: the label is missing"):
        task(TaskConfig(name=kind)).check(data, options(), 0, 1)
    # A language of that code is listed.
    if value.islower() and value[0] == '"':
        listed = f"x,y,{value.strip(chr(34))}"
        task(TaskConfig(name=kind)).check(config(tmp_path, "train.jsonl", labels=listed), options(), 0, 1)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400"])
def test_a_text_that_is_no_number_is_refused_by_its_line(tmp_path, value):
    (tmp_path / "train.jsonl").write_text(f'{{"text": "a", "label": "x"}}\n{{"text": {value}, "label": "y"}}')
    message = read("sequence-classification", config(tmp_path, "train.jsonl"))
    assert "train.jsonl, line 2: the text is empty" in message


def test_a_parquet_file_keeps_the_names_of_its_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": ["a", "b", "c"], "label": [1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    named, numbered = (config(tmp_path, "train.parquet", labels=labels) for labels in ("", "0,1"))
    assert read("sequence-classification", named) == [("a", "yes"), ("b", "no"), ("c", "yes")]
    # A list of numbers, as earlier runs have it, keeps them.
    assert read("sequence-classification", numbered) == [("a", "1"), ("b", "0"), ("c", "1")]


CODE = ["    if x:\n        return 1\n", "\tdef f():\n", "x = 1  \n\n", "plain"]


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet"])
def test_a_language_model_keeps_blanks_and_line_feeds_of_a_text(tmp_path, name):
    if name == "train.jsonl":
        write_objects(tmp_path / name, [{"text": text} for text in [*CODE, "  \n"]])
    elif name == "train.csv":
        write_cells(tmp_path / name, [(text, "a") for text in [*CODE, "  \n"]])
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": [*CODE, "  \n"]}), tmp_path / name)
    assert texts(config(tmp_path, name)) == CODE


def test_a_line_of_a_text_file_keeps_its_blanks_and_loses_its_end(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"    if x:\r\n\treturn 1 \r\n \r\n\r\nend")
    assert texts(config(tmp_path, "train.txt")) == ["    if x:", "\treturn 1 ", "end"]


def test_a_spelling_that_is_listed_is_kept(tmp_path):
    write_objects(tmp_path / "train.jsonl", [{"text": "a text", "label": value} for value in ("1.0", 0.0, 1, True)])
    found = read("sequence-classification", config(tmp_path, "train.jsonl", labels="0.0,1.0"))
    assert [label for _, label in found] == ["1.0", "0.0", "1.0", "1.0"]


@pytest.mark.parametrize("comment", ["# id 00-11\tdomain=en", "# text = vitamin O", "#", "# newdoc", "#id 7"])
def test_comments_of_tagged_sentences_are_skipped_and_words_are_not(tmp_path, comment):
    text = f"{comment}\nAda _ _ B-PER\n# _ _ O\n#tag _ _ O\n\n{comment}\nsleeps _ _ O\n"
    (tmp_path / "train.conll").write_text(text)
    expected = [(["Ada", "#", "#tag"], ["B-PER", "O", "O"]), (["sleeps"], ["O"])]
    assert read("token-classification", config(tmp_path, "train.conll")) == expected
    assert texts(config(tmp_path, "train.conll")) == ["Ada # #tag", "sleeps"]


def test_conll_u_has_its_words_in_the_second_column(tmp_path):
    rows = ["1-2\tdu\t_", "1\tde\tde", "2\tle\tle", "2.1\tnul\t_", "3\tpain\tpain"]
    lines = [row + "\tX" * (row[1] == "\t") + "\t_" * 7 for row in rows]
    (tmp_path / "train.conllu").write_text("# sent_id = 1\n# text = du pain\n" + "\n".join(lines) + "\n\n")
    assert texts(config(tmp_path, "train.conllu")) == ["de le pain"]
    tagged = "\n".join(line.replace("\tX\t", "\tB-X\t") for line in lines)
    (tmp_path / "train.conllu").write_text(f"# text = du pain\n{tagged}\n\n")
    data = config(tmp_path, "train.conllu", label_column="3")
    assert read("token-classification", data) == [(["de", "le", "pain"], ["B-X", "B-X", "B-X"])]


@pytest.mark.parametrize("mark", ["\t", " ", "  "])
@pytest.mark.parametrize("blank", ["\u00a0", "\u2009", "\u3000", "\x85"])
def test_words_end_at_blanks_of_ascii_alone(tmp_path, mark, blank):
    word = f"10{blank}000"
    (tmp_path / "train.conll").write_text(f"{word}{mark}B-QTY\nkg{mark}O\n", encoding="utf-8")
    assert read("token-classification", config(tmp_path, "train.conll")) == [([word, "kg"], ["B-QTY", "O"])]
    (tmp_path / "train.tsv").write_text(f"tokens\ttags\n{word} kg\tB-QTY O\n", encoding="utf-8")
    assert read("token-classification", config(tmp_path, "train.tsv")) == [([word, "kg"], ["B-QTY", "O"])]


@pytest.mark.parametrize("end", ["\r", "\r\n"])
@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.tsv", "train.csv", "train.conll"])
def test_lines_end_at_carriage_returns_too(tmp_path, name, end):
    rows = ["text\tlabel", *map("\t".join, ROWS)]
    if name == "train.txt":
        rows = [text for text, _ in ROWS]
    elif name == "train.jsonl":
        rows = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    elif name == "train.conll":
        rows = ["Ada B-PER", "sleeps O", "", "word O"]
    (tmp_path / name).write_bytes("".join(row + end for row in rows).encode())
    if name == "train.conll":
        tagged = read("token-classification", config(tmp_path, name))
        assert tagged == [(["Ada", "sleeps"], ["B-PER", "O"]), (["word"], ["O"])]
        return
    assert texts(config(tmp_path, name)) == [text for text, _ in ROWS]
    if name != "train.txt":
        assert read("sequence-classification", config(tmp_path, name)) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.tsv", "train.csv"])
def test_byte_order_marks_of_joined_files_are_no_part_of_a_text_or_label(tmp_path, name, encoding):
    rows = ["label\ttext", *(f"{label}\t{text}" for text, label in ROWS)]
    if name == "train.txt":
        rows = [text for text, _ in ROWS]
    elif name == "train.jsonl":
        rows = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    # The second file has no header.
    joined = "".join("\ufeff" * (i in (0, 5)) + f"{row}\n" for i, row in enumerate(rows))
    (tmp_path / name).write_bytes(joined.encode(encoding))
    assert texts(config(tmp_path, name)) == [text for text, _ in ROWS]
    if name != "train.txt":
        assert read("sequence-classification", config(tmp_path, name)) == ROWS
