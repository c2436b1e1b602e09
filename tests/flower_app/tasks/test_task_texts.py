"""Texts and ids on disk behave like lists in memory, and leave nothing in memory or behind."""

import os

import numpy as np
import pytest

from client_pipeline.runtime.memory import resident_bytes
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.texts import Texts, in_chunks, lines, stored_integers, subset

TEXTS = ["ein Hund", "", "größer als 你好", "a\u2028b", "lone \udc80 surrogate"]


def test_texts_are_a_sequence_like_a_list():
    texts = Texts(iter(TEXTS))
    assert len(texts) == 5 and list(texts) == TEXTS and texts == TEXTS and texts != TEXTS[1:]
    assert texts[2] == TEXTS[2] and texts[-1] == TEXTS[-1] and texts[1:3] == TEXTS[1:3]
    with pytest.raises(IndexError):
        texts[5]
    assert len(Texts([])) == 0 and list(Texts([])) == []


def test_a_choice_of_a_choice_copies_nothing_and_keeps_the_order():
    texts = Texts(str(i) for i in range(100))
    chosen = subset(subset(texts, np.array([9, 4, 77])), [2, 0])
    assert chosen == ["77", "9"] and chosen._file is texts._file
    assert subset(["a", "b", "c"], [2, 0]) == ["c", "a"]


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffeins\u2028zwei\r\n\n drei".encode())
    assert list(lines(path, "key")) == ["eins\u2028zwei\r", "", " drei"]


def test_items_are_worked_on_a_chunk_at_a_time():
    seen = []
    found = in_chunks(lambda chunk: seen.append(len(chunk)) or [2 * x for x in chunk], iter(range(7)), size=3)
    assert next(found) == 0 and seen == [3]
    assert list(found) == [2, 4, 6, 8, 10, 12] and seen == [3, 3, 1]


def test_integers_are_mapped_and_their_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    values, starts = stored_integers([[1, 2], [], [3]])
    assert isinstance(values, np.memmap) and values.tolist() == [1, 2, 3] and starts.tolist() == [0, 2, 2, 3]
    assert os.listdir(tmp_path) == []
    empty = EncodedText.of([])
    assert len(empty) == 0


def test_a_pass_over_millions_of_texts_keeps_their_places_alone():
    before = resident_bytes()
    texts = Texts(f"this is sentence number {i} of a corpus that is larger than memory" for i in range(500_000))
    characters = sum(map(len, texts))
    ids, starts = stored_integers([i] * 20 for i in range(500_000))
    assert characters > 30e6 and len(ids) == 10_000_000
    # 4 MB each for the places of texts and ids; the texts are over 30 MB, the ids 40 MB.
    assert resident_bytes() - before < 25e6
    assert texts[499_999].startswith("this is sentence number 499999 ") and ids[-1] == 499_999
    assert starts[-1] == 10_000_000
