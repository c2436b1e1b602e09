"""Text of many scripts: marks, words without blanks, and characters that a tokenizer lacks."""

import csv
import json
import logging
import random

import pytest

from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.word_pieces import train_wordpiece
from helpers.task_cases import options, prepare, train

NAME = "sequence-classification"


def table(folder, rows, name="train.csv", **changes):
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    values = {"vocab_size": 400, "max_length": 40, "lowercase": True, "validation_source": name} | changes
    return DataConfig(source="files", path=str(folder), train_source=name, **values)


def tokens_of(prepared, text):
    (ids,) = TextTokenizer.from_json(prepared.tokenizer_json).encode([text])
    tokens = {number: token for token, number in TextTokenizer.from_json(prepared.tokenizer_json).vocabulary().items()}
    return [tokens[i] for i in ids]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bạn", "bán"),
        ("ma", "mã"),
        ("ข้าว", "ขาว"),
        ("कुल", "कल"),
        ("சொல", "சல"),
        ("חָתוּל", "חתול"),
        ("عِلم", "عَلم"),
        ("schön", "schon"),
        ("мои", "мой"),
        ("がき", "かき"),
    ],
)
def test_lower_casing_keeps_the_marks_that_tell_words_apart(tmp_path, one, other):
    prepared = prepare(NAME, table(tmp_path, [(f"1 {one} 2", "a"), (f"1 {other} 2", "b")] * 3))
    assert tokens_of(prepared, one) != tokens_of(prepared, other)
    assert "[UNK]" not in tokens_of(prepared, one) + tokens_of(prepared, other)


def test_lower_casing_folds_case_and_leaves_korean_syllables_whole(tmp_path):
    prepared = prepare(NAME, table(tmp_path, [("ÁB 한국어 áb", "a"), ("한국어 áb", "b")] * 3))
    assert tokens_of(prepared, "ÁB") == tokens_of(prepared, "áb")
    assert tokens_of(prepared, "한국어") == ["한국어"]


def test_two_classes_that_a_tone_mark_tells_apart_are_learned(tmp_path):
    rows = [
        (f"Hôm nay {name} muốn {word} cũ số {i}", label)
        for i in range(10)
        for name in ("Bình", "Chi", "Dũng", "An")
        for word, label in (("bạn", "friend"), ("bán", "sale"))
    ]
    data = table(tmp_path, rows)
    prepared = prepare(NAME, data, options(dropout=0.0))
    parts = train(NAME, prepared, data, steps=25)
    assert prepared.evaluator.evaluate(parts, "test").metrics["accuracy"] == 1


def test_words_of_over_a_hundred_characters_are_known(tmp_path):
    rng = random.Random(0)
    strands = ["".join(rng.choices("ACGT", k=rng.randint(150, 320))) for _ in range(40)]
    data = table(tmp_path, [(strand, "ab"[i % 2]) for i, strand in enumerate(strands)], max_length=400)
    prepared = prepare(NAME, data, options(max_length=400))
    for strand in strands:
        tokens = tokens_of(prepared, strand)
        assert "".join(token.removeprefix("##") for token in tokens) == strand.lower()
    # A word of a tagged sentence keeps its number.
    ((_, owners),) = TextTokenizer.from_json(prepared.tokenizer_json).encode_words([[strands[0], "acg"]])
    assert owners == sorted(owners) and set(owners) == {0, 1}


@pytest.mark.parametrize(
    ("name", "head"), [(NAME, "label"), ("token-classification", "tags"), ("masked-lm", ""), ("causal-lm", "")]
)
def test_a_tokenizer_that_lacks_the_script_is_refused_with_its_share(tmp_path, name, head):
    latin = train_wordpiece(["the quick brown fox jumps over a lazy dog", "[MASK]"], 300, False, False)
    (tmp_path / "tokenizer.json").write_text(latin.to_json(), encoding="utf-8")
    values = {"label": "a", "tags": ["O", "B-X"], "": ""}[head]
    rows = [
        {"text": "ราคา ดี", "tokens": ["ราคา", "ดี"], head: values},
        {"text": "ไม่ ดี", "tokens": ["ไม่", "ดี"], head: values},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = DataConfig(
        source="files",
        path=str(tmp_path),
        train_source="t.jsonl",
        test_source="t.jsonl",
        source_column="tokens" if head == "tags" else "text",
        tokenizer=str(tmp_path),
        labels="" if head == "tags" else "a,b",
        max_length=40,
    )
    model = options(family="gpt2") if name == "causal-lm" else options()
    with pytest.raises(ValueError, match=r"100\.0% of the tokens of 2 texts are unknown, as in '.+'; expected at most"):
        task(TaskConfig(name=name)).check(data, model, 0, 1)


def test_a_vocabulary_without_room_for_all_characters_is_told_or_refused(tmp_path, caplog):
    common = "的一是不了在人有我他"
    rare = [chr(0x4E00 + i) for i in range(400)]
    data = table(tmp_path, [(common + character, "ab"[i % 2]) for i, character in enumerate(rare)], vocab_size=300)
    with caplog.at_level(logging.WARNING):
        prepare(NAME, data)
    assert "of the tokens of 400 texts are unknown" in caplog.text and "data.vocab-size" in caplog.text
    data = table(tmp_path, [(character * 2, "ab"[i % 2]) for i, character in enumerate(rare * 2)], vocab_size=300)
    with pytest.raises(ValueError, match=r"data\.vocab-size: .*% of the tokens .* expected at most 25%: raise it"):
        prepare(NAME, data)


def test_text_from_right_to_left_and_joined_emoji_come_through(tmp_path):
    rows = [(f"‏המשאבה נעצרה 🛠️👩🏽‍🔧 {i}", "אב"[i % 2]) for i in range(20)]
    data = table(tmp_path, rows)
    prepared = prepare(NAME, data)
    chosen = task(TaskConfig(name=NAME))
    assert [*chosen.read(data, "train", None).inputs] == [text for text, _ in rows]
    assert "[UNK]" not in tokens_of(prepared, rows[0][0])
    assert set(chosen.predict(prepared.build(0), prepared.tokenizer_json, [text for text, _ in rows])) <= set("אב")
