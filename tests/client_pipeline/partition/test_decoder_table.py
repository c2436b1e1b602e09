"""The table of decoder-only model types in the page of families is what the command finds."""

import pytest

from client_pipeline.families.decoder_table import BEGIN, END, Row, all_types, row_of, rows, with_rows
from helpers.repository import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TABLE = PAGE.split(BEGIN)[1].split(END)[0].splitlines()[3:]


def test_the_table_has_one_row_for_each_type_of_the_library():
    assert [line.split("`")[1] for line in TABLE] == all_types()
    assert all(line.split(" | ")[1].startswith(("splits", "refused: ")) for line in TABLE)


def test_new_rows_take_the_places_of_old_ones_and_leave_the_page_alone():
    page = with_rows(PAGE, [Row("llama", "refused: a trial")])
    assert "| `llama` | refused: a trial |  |\n" in page
    assert with_rows(page, [Row("llama", "splits", "yes")]) == PAGE


@pytest.mark.slow
def test_a_type_that_ends_its_process_is_refused(monkeypatch):
    monkeypatch.setattr("client_pipeline.families.decoder_table.row_of", lambda name: (_ for _ in ()).throw(SystemExit))
    assert [row.cut for row in rows(["llama"])] == ["refused: its process ended"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "gemma3n_text", "llama", "nanochat", "phimoe"])
def test_a_row_is_what_the_command_finds(model_type):
    assert row_of(model_type).text() in TABLE
