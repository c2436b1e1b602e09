"""``collapipe init``: files as spreadsheets, hubs and competitions leave them."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from client_pipeline import durable
from flower_app.config.sources import load_config
from flower_app.tasks.base import task
from helpers import command_line
from helpers.crash_model import FullDisk

ROWS = [(f"the {'red' if i % 3 else 'blue'} pump number {i} works", "ab"[i % 2]) for i in range(40)]


pytestmark = pytest.mark.usefixtures("elsewhere")


def init(*words):
    return command_line.init(*words, "--out", "mine.toml")


def text_of(rows, mark=",", end="\n", header=("text", "label")):
    return "".join(mark.join(row) + end for row in [header, *rows])


def read_back(split="train"):
    """Rows that the run that was written reads, or what is told of a mistake; None where there is none."""
    if not Path("mine.toml").exists():
        return None
    config = load_config("mine.toml")
    if config.task.name != "sequence-classification":
        return config.task.name
    try:
        examples = task(config.task).read(config.data, split, None)
    except ValueError as error:
        return str(error)
    return list(zip(examples.inputs, examples.labels, strict=True))


def all_rows():
    """Training and held-out rows of the run that was written, in their order."""
    read, held_out = read_back(), read_back("validation")
    return sorted(read + held_out) if isinstance(read, list) and isinstance(held_out, list) else read


JSON_LINES = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
JSON_LIST = json.dumps([{"text": text, "label": label} for text, label in ROWS])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("REVIEWS.CSV", text_of(ROWS, end="\r\n").encode()),
        ("Reviews.Tsv", text_of(ROWS, mark="\t").encode()),
        ("reviews.tab", text_of(ROWS, mark="\t").encode()),
        ("reviews.ndjson", JSON_LINES.encode()),
        ("reviews.json", JSON_LIST.encode()),
        ("pretty.json", json.dumps(json.loads(JSON_LIST), indent=2).encode()),
        ("lines.json", JSON_LINES.encode()),
        ("reviews.csv.gz", gzip.compress(text_of(ROWS).encode())),
        ("reviews.jsonl.GZ", gzip.compress(JSON_LINES.encode())),
        ("bom.csv", text_of(ROWS).encode("utf-8-sig")),
        ("excel.csv", text_of(ROWS, mark="\t", end="\r\n").encode("utf-16")),
        ("utf32.csv", text_of(ROWS).encode("utf-32")),
        ("mac.csv", text_of(ROWS, end="\r").encode()),
        ("semicolon.csv", text_of(ROWS, mark=";").encode()),
        ("commas.csv", text_of([(f"{text}, 0,50 Euro, ja", label) for text, label in ROWS], mark=";").encode()),
        ("bars.csv", text_of(ROWS, mark="|").encode()),
        ("sep.csv", ("sep=;\r\n" + text_of(ROWS, mark=";", end="\r\n")).encode()),
        ("sep.tsv", ("sep=\t\n" + text_of(ROWS, mark="\t")).encode()),
        ("sep.csv", ("sep=\t\n" + text_of([(f'"{text}"', label) for text, label in ROWS], mark="\t")).encode()),
        ("commas.tsv", text_of(ROWS).encode()),
        ("index.csv", text_of([("7", *row) for row in ROWS], header=("", "text", "label")).encode()),
        ("numbers.csv", text_of(ROWS, header=("0", "1")).encode()),
        ("both.csv", text_of([("7", *row) for row in ROWS], header=("", "0", "1")).encode()),
        ("joined.csv", (text_of(ROWS[:20]) + text_of(ROWS[20:])).encode()),
    ],
)
def test_a_table_is_read_as_it_is_written(name, content):
    Path(name).write_bytes(content)
    code, told = init(name)
    expected = [(f"{text}, 0,50 Euro, ja", label) for text, label in ROWS] if name == "commas.csv" else ROWS
    assert (code, all_rows()) == (0, sorted(expected)), told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.xlsx", b"PK\x03\x04..", "a.xlsx: files .xlsx are not read; save it as CSV"),
        ("a.XLS", b"\xd0\xcf\x11\xe0", "files .xls are not read; save it as CSV"),
        ("a.zip", b"PK\x03\x04..", "files .zip are not read; unpack it"),
        ("a.tar.gz", gzip.compress(b"a", mtime=0), "files .tar are not read; unpack it"),
        ("a.docx", b"PK\x03\x04..", "files .docx are not read; save it as plain text"),
        ("a.pkl", b"\x80\x04", "files .pkl are not read; save it as parquet, CSV or JSON lines"),
        ("a.csv", b"PK\x03\x04..", "a.csv is a spreadsheet or an archive by its first bytes; save it as CSV"),
        ("a.csv", b"PAR1....", "a.csv is a parquet file by its first bytes"),
        ("a.csv", text_of([("größe", "ä")]).encode("latin-1"), "convert it, from Latin-1 say: iconv -f WINDOWS-1252"),
        ("a.csv", text_of(ROWS).encode("utf-16-le"), "it has zero bytes; convert it, from UTF-16 say: iconv"),
        ("a.csv.gz", gzip.compress(text_of(ROWS).encode())[:-20], "a.csv.gz is damaged"),
        ("a.json", b'{"text": {"0": "a"}, "label": {"0": "b"}}', "found one object with text, label; write its rows"),
    ],
)
def test_what_is_not_read_is_refused_by_its_format_and_with_the_remedy(name, content, told):
    Path(name).write_bytes(content)
    code, line = init(name)
    assert code == 2 and line.count("\n") == 0 and told in line, line
    assert [path.name for path in Path().iterdir()] == [name]


def write_shards(folder, split, number, rows=ROWS):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for shard in range(number):
        texts, labels = zip(*rows[shard::number], strict=True)
        table = pyarrow.table({"text": list(texts), "label": list(labels)})
        parquet.write_table(table, f"{folder}/{split}-{shard:05}-of-{number:05}.parquet")


@pytest.mark.parametrize("folder", ["shards", "shards/data", "shards/plain_text"])
@pytest.mark.parametrize("named", [False, True])
def test_all_shards_are_read(folder, named):
    write_shards(folder, "train", 3)
    write_shards(folder, "test", 1, ROWS[:6])
    code, told = init(f"{folder}/train-00001-of-00003.parquet" if named else "shards")
    assert (code, sorted(read_back() or [])) == (0, sorted(ROWS)), told
    assert sorted(read_back("test")) == sorted(ROWS[:6])
    assert "train: 3 files train-*-of-*.parquet are read as one" in told


@pytest.mark.parametrize("name", ["part-{}.csv", "{}.jsonl", "part-{}-ab12.csv.gz"])
def test_folders_may_say_the_split(name):
    for split, rows in (("train", ROWS), ("validation", ROWS[:4]), ("test", ROWS[4:8])):
        Path("my", split).mkdir(parents=True)
        for shard in range(2):
            part = rows[shard::2]
            text = text_of(part)
            if "jsonl" in name:
                text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in part)
            data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
            Path("my", split, name.format(shard)).write_bytes(data)
    code, told = init("my")
    assert (code, sorted(read_back() or [])) == (0, sorted(ROWS)), told
    assert [sorted(read_back(split)) for split in ("validation", "test")] == [sorted(ROWS[:4]), sorted(ROWS[4:8])]


@pytest.mark.parametrize(
    "names", [("train.csv", "train.jsonl"), ("main/train.csv", "other/train.csv"), ("train.csv", "train_clean.csv")]
)
def test_of_several_tables_none_is_chosen_in_silence(names):
    for name in names:
        Path("my", name).parent.mkdir(parents=True, exist_ok=True)
        Path("my", name).write_text(JSON_LINES if name.endswith("jsonl") else text_of(ROWS))
    code, told = init("my")
    assert code == 2 and f"found {', '.join(names)}; name the training file itself" in told


@pytest.mark.parametrize("name", ["train2.xlsx", "train_more.txt", "more.csv", "sub/train.csv"])
def test_files_of_a_folder_that_are_not_read_are_told(name):
    for path in ("my/train.csv", "my/test.csv", f"my/{name}", "my/.hidden"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text_of(ROWS))
    code, told = init("my")
    assert (code, read_back()) == (0, ROWS), told
    lines = [line.strip() for line in told.split("\n") if "not read" in line]
    assert lines == ([] if "/" in name else [f"files of the folder that are not read: {name}"])
    Path("mine.toml").unlink()
    assert "not read" not in init("my/train.csv")[1]


def test_a_saved_dataset_is_read_with_its_names(monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    texts, labels = [text for text, _ in ROWS], ["ab".index(label) for _, label in ROWS]
    table = datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)
    hidden = datasets.Dataset.from_dict({"text": texts, "label": [-1] * len(ROWS)}, features=features)
    datasets.DatasetDict({"train": table, "validation": table, "test": hidden}).save_to_disk("saved")
    code, told = init("saved")
    expected = [(text, ["yes", "no"]["ab".index(label)]) for text, label in ROWS]
    assert (code, read_back()) == (0, expected), told
    assert "test has no labels in a column label, so it is left out" in told
    assert read_back("test") == expected
    # Its parquet files name the classes, too.
    table.to_parquet("train.parquet")
    Path("mine.toml").unlink()
    code, told = init("train.parquet")
    assert (code, all_rows()) == (0, sorted(expected)), told


@pytest.mark.parametrize("label", [None, "", "missing"])
@pytest.mark.parametrize("source", ["train.csv", "."])
def test_the_test_file_of_a_competition_is_left_out_and_named(label, source):
    Path("train.csv").write_text(text_of(ROWS, header=("text", "target")))
    header = ("text",) if label == "missing" else ("text", "target")
    hidden = [(text,) if label == "missing" else (text, label or "") for text, _ in ROWS]
    Path("test.csv").write_text(text_of(hidden, header=header))
    Path("sample_submission.csv").write_text("id,target\n0,a\n")
    code, told = init(source)
    assert (code, all_rows()) == (0, sorted(ROWS)), told
    assert "test: test.csv has no labels in a column target, so it is left out; collapipe predict --file labels" in told
    Path("mine.toml").unlink()
    code, told = init("train.csv", "--test", "test.csv")
    assert code == 2 and "--test: test.csv has no labels in a column target; name a file that has them" in told


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"label": float("nan")}], "line 1: the label is missing (nan); write one, or remove the row"),
        ([{"label": "a"}, {"label": float("nan")}], "line 2: the label is missing (nan)"),
        ([{"label": "a"}, {"label": "nan"}], "line 2: the label is missing, found 'nan'"),
        ([{"label": "a"}, {"label": None}], "line 2: the label is empty"),
        ([{}], "line 1: no column 'label', found text"),
        ([{"label": "a"}, {}], "line 2: no column 'label', found text"),
        ([{"label": "a", "text": float("nan")}], "line 1: the text is empty"),
    ],
)
def test_what_is_missing_is_refused_by_its_line_before_anything_is_written(rows, told):
    rest = [{"text": text, "label": label} for text, label in ROWS]
    filled = [{"text": "the early pump"} | row for row in rows]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*filled, *rest]))
    code, line = init("train.jsonl")
    assert code == 2 and line.count("\n") == 0 and f"train.jsonl, {told}" in line, line
    assert [path.name for path in Path().iterdir()] == ["train.jsonl"]


def test_columns_of_shards_are_read_by_their_names():
    headers = [("text", "label"), ("label", "text")]
    for shard, header in enumerate(headers):
        rows = [dict(zip(("text", "label"), row, strict=True)) for row in ROWS[shard::2]]
        content = text_of([[row[name] for name in header] for row in rows], header=header)
        Path(f"train-0000{shard}-of-00002.csv").write_text(content)
    code, told = init("train-00000-of-00002.csv")
    assert (code, all_rows()) == (0, sorted(ROWS)), told
    Path("mine.toml").unlink()
    Path("train-00001-of-00002.csv").write_text(text_of(ROWS, header=("txt", "label")))
    code, told = init("train-00000-of-00002.csv")
    assert code == 2 and "train-00001-of-00002.csv: expected the columns text, label of the other shards" in told


def test_columns_without_a_name_are_told_and_never_chosen():
    rows = [(str(i), *row, "a remark, and a long one") for i, row in enumerate(ROWS)]
    for header in (("", "text", "label", ""), ("Unnamed: 0.1", "text", "label", "Unnamed: 3")):
        with open("mine.csv", "w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        code, told = init("mine.csv")
        assert (code, all_rows()) == (0, sorted(ROWS)), told
        assert f"columns without a name are not used: {header[0] or 'Unnamed: 0'}, Unnamed: 3" in told
        Path("mine.toml").unlink()
        for path in Path("mine-data").iterdir():
            path.unlink()
    Path("mine.csv").write_text(text_of(ROWS, header=("", "")))
    code, told = init("mine.csv")
    assert code == 2 and "expected columns with names, found Unnamed: 0, Unnamed: 1; name them" in told


def test_a_shard_that_is_missing_is_told():
    write_shards("shards", "train", 3)
    Path("shards/train-00001-of-00003.parquet").unlink()
    code, told = init("shards")
    assert code == 2 and "expected 3 shards, found 2" in told


def test_columns_of_all_rows_count():
    # The first row lacks the texts' column; it is refused by its line, not read as a table without texts.
    rows = [{"kind": "a"}, *({"text": text, "kind": label} for text, label in ROWS)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, told = init("train.jsonl")
    assert code == 2 and "train.jsonl, line 1: no column 'text', found kind; name another, or write it there" in told
    # A column that nobody needs may be in some rows only.
    rows = [{"text": text, "kind": label} | ({"note": 1} if i == 9 else {}) for i, (text, label) in enumerate(ROWS)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (init("train.jsonl")[0], all_rows()) == (0, sorted(ROWS))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", text_of(ROWS, mark=";"), "a.csv: cells are separated by semicolons"),
        ("a.csv", text_of(ROWS, header=("0", "1")), "a.csv: the first row numbers the columns, and is no example"),
        ("a.csv", text_of(ROWS, header=ROWS[0]), "a.csv: no row names the columns, which are numbered from 0"),
        (
            "a.csv",
            text_of(ROWS[:20]) + text_of(ROWS[20:]),
            "a.csv: rows that repeat the header are left out: 1, the first in line 22",
        ),
    ],
)
def test_decisions_are_told(name, content, told):
    Path(name).write_text(content)
    code, lines = init(name)
    assert code == 0 and any(line.strip().endswith(told) for line in lines.split("\n")), lines


def test_a_mark_between_cells_that_a_blank_follows_is_punctuation():
    rows = [(f"{text}, well", label) for text, label in ROWS]
    Path("mine.csv").write_text(text_of(rows, mark=";", header=("text, in words", "label")))
    code, told = init("mine.csv")
    assert (code, all_rows()) == (0, sorted(rows)), told
    assert "mine.csv: cells are separated by semicolons" in told


@pytest.mark.parametrize(
    ("header", "mark", "told"),
    [
        ("text", ";", "expected 2 columns with semicolons between as in the rows below, found 1"),
        ("text,label", ";", "expected 2 columns with semicolons between as in the rows below, found 1"),
        ("text;label", ",", "expected 2 columns with commas between as in the rows below, found 1"),
        ("text", "|", "expected 2 columns with vertical bars between as in the rows below, found 1"),
        ("a,text,label", ",", "expected 2 columns with commas between as in the rows below, found 3"),
    ],
)
@pytest.mark.parametrize("name", ["mine.csv", "mine.tsv"])
def test_a_header_that_is_cut_otherwise_than_the_rows_is_refused(name, header, mark, told):
    Path(name).write_text(f"{header}\n" + "".join(f"{text}{mark}{label}\n" for text, label in ROWS))
    code, line = init(name)
    assert code == 2 and f"{name}, line 1: {told}; write the first row as these" in line, line
    # Quotes make one cell.
    Path(name).write_text("text\n" + "".join(f'"{text}{mark}{label}"\n' for text, label in ROWS))
    assert init(name)[0] == 0 and read_back() == "masked-lm"


@pytest.mark.parametrize("mark", [",", "\t", ";"])
def test_quoted_cells_hold_quotes_marks_and_line_feeds(mark):
    rows = [(f'She said "{text}",\n\tand; left.', label) for text, label in ROWS]
    with open("quoted.tsv" if mark == "\t" else "quoted.csv", "w", newline="") as file:
        csv.writer(file, delimiter=mark).writerows([("text", "label"), *rows])
    code, told = init(file.name)
    assert (code, all_rows()) == (0, sorted(rows)), told
    assert ("cells in quotes are read without them" in told) == (mark == "\t")


def test_quotes_of_a_tsv_that_quotes_nothing_stay():
    rows = [(f'"{text} she said' if i % 2 else f"he {text}", label) for i, (text, label) in enumerate(ROWS)]
    Path("raw.tsv").write_text(text_of(rows, mark="\t"))
    assert (init("raw.tsv")[0], all_rows()) == (0, sorted(rows))


def test_splits_may_spell_a_value_each_in_its_own_way():
    numbers = [(text, str("ab".index(label))) for text, label in ROWS]
    Path("train.csv").write_text(text_of(numbers))
    Path("test.csv").write_text(text_of([(text, f"{value}.0") for text, value in numbers]))
    code, told = init("train.csv")
    assert (code, read_back("test")) == (0, numbers), told


def test_two_text_files_of_one_ending_are_set_aside_side_by_side():
    for side in ("en", "de"):
        Path(f"{side}.txt").write_text("".join(f"{side} {i} dogs\n" for i in range(40)))
    code, told = init("en.txt", "de.txt")
    assert code == 0, told
    data = load_config("mine.toml").data
    pairs = [
        [int(line.split()[1]) for line in Path("mine-data", name).read_text().splitlines()]
        for name in (data.train_source, data.train_target)
    ]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 36


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_full_disk_leaves_nothing_half_written(monkeypatch, fails_at):
    """Two files are set aside and the configuration is written: an operation fills each, another names it."""
    Path("train.csv").write_text(text_of(ROWS))
    monkeypatch.setattr(durable, "disk", FullDisk(fails_at))
    code, line = init("train.csv")
    assert code == 1 and line.count("\n") == 0 and "No space left on device; make room there" in line, line
    assert [path.name for path in Path().iterdir()] == ["train.csv"]
