"""Tables as people have them: halves of characters, long cells, names twice, values that are not there."""

import pyarrow
import pytest

from flower_app.first_config.own_text import _flat
from flower_app.tasks.data.cells import csv_line
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.tables import columns_of, read_table, read_table_rows
from helpers.task_cases import prepare

KEY = "data.train-source"


def test_half_a_character_becomes_the_mark_for_one_and_a_whole_one_stays(tmp_path):
    file = tmp_path / "tweets.jsonl"
    file.write_text(r'{"text": "so sad \ud83d", "tags": ["\ude00", "\ud83d\ude00", "\u00e4"]}' + "\n")
    [(_, row)] = read_table_rows(file, KEY)
    assert row == {"text": "so sad \ufffd", "tags": ["\ufffd", "\U0001f600", "ä"]}
    assert str(row).encode()


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    ("name", "whole", "cut"),
    [
        ("sequence-classification", '{"text": "a", "label": "Y"}', r'{"text": "a", "label": "Y\ud83d"}'),
        ("token-classification", '{"tokens": ["a"], "tags": ["B-Y"]}', r'{"tokens": ["a"], "tags": ["B-Y\ud83d"]}'),
    ],
)
def test_a_label_with_half_a_character_is_refused_before_training(tmp_path, name, whole, cut, split):
    splits = ("train", "validation", "test")
    for each in splits:
        rows = [whole, whole.replace("Y", "Z"), cut if each == split else whole]
        (tmp_path / f"{each}.jsonl").write_text("\n".join(rows))
    sources = {f"{each}_source": f"{each}.jsonl" for each in splits}
    data = DataConfig(source="files", path=str(tmp_path), vocab_size=300, max_length=40, **sources)
    expected = rf"data\.label-column: .*{split}\.jsonl, line 3: expected a whole label, found .*U\+FFFD\); correct it"
    with pytest.raises(ValueError, match=expected):
        prepare(name, data)


@pytest.mark.parametrize("name", ["twice.csv", "twice.tsv"])
def test_a_column_named_twice_is_refused(tmp_path, name):
    file, mark = tmp_path / name, "," if name.endswith("csv") else "\t"
    file.write_text(mark.join(["text", "x", "x"]) + "\n" + mark.join("abc") + "\n")
    with pytest.raises(ValueError, match="expected a name of its own for each column, found 'x' twice; rename one"):
        read_table_rows(file, KEY)
    # Spreadsheets leave columns without a name behind, and a table that is saved again has its index twice.
    for header, names in (
        (["text", "", " "], ["text", "Unnamed: 1", "Unnamed: 2"]),
        (["", "Unnamed: 0", "text"], ["Unnamed: 0.1", "Unnamed: 0", "text"]),
    ):
        file.write_text(mark.join(header) + "\n" + mark.join("abc") + "\n")
        assert read_table_rows(file, KEY) == [(2, dict(zip(names, "abc", strict=True)))]


@pytest.mark.parametrize("first", [None, {"en": "a"}])
def test_a_value_that_is_not_there_is_empty_within_a_column_too(tmp_path, first):
    values, columns = [first, {"en": "b"}, None], {"data.source-column": "tr.en"}
    table = columns_of(pyarrow.table({"tr": values}), columns, KEY, "table")
    expected = [first and "a", "b", None]
    assert table.columns["data.source-column"] == expected
    assert list(table.texts("data.source-column")) == [text or "" for text in expected]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f'{{"tr": {"null" if v is None else str(v).replace(chr(39), chr(34))}}}\n' for v in values))
    assert read_table(file, columns, KEY).columns["data.source-column"] == expected
    assert _flat({"tr": values}) == {"tr.en": expected}
    with pytest.raises(ValueError, match="has no key 'de' in column 'tr'"):
        columns_of(pyarrow.table({"tr": values}), {"data.source-column": "tr.de"}, KEY, "table")


@pytest.mark.parametrize("cells", [["a", "b"], ["a\rb", "c\nd"], ['"', ","], ["", "x"], ["\r\n", "e\r"]])
def test_a_row_is_read_as_it_was_written(tmp_path, cells):
    file = tmp_path / "row.csv"
    file.write_bytes(f"one,two\n{csv_line(cells)}".encode())
    assert read_table_rows(file, KEY)[0][1] == dict(zip(("one", "two"), cells, strict=True))
