"""Conversations: the forms of rows that make them, and what is refused with its line."""

import json

import pytest

from flower_app.tasks.data.conversations import find_columns, load_conversations, question_of
from flower_app.tasks.data.corpus import DataConfig

ASKED, ANSWERED = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The dog."}
TALK = [ASKED, ANSWERED]
BRIEF = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The dog."}]
FORMS = {
    "messages": ({"messages": TALK}, TALK),
    "messages-of-a-system": ({"messages": [BRIEF, *TALK, *TALK], "id": 3}, [BRIEF, *TALK, *TALK]),
    "sharegpt": ({"conversations": SHAREGPT, "id": "a"}, TALK),
    "prompt-completion": ({"prompt": "Who?", "completion": "The dog."}, TALK),
    "prompt-completion-of-messages": ({"prompt": [BRIEF, ASKED], "completion": [ANSWERED]}, [BRIEF, *TALK]),
    "prompt-of-messages-with-completion": ({"prompt": [BRIEF, ASKED], "completion": "The dog."}, [BRIEF, *TALK]),
    "sharegpt-with-system": ({"system": "Be brief.", "conversations": SHAREGPT}, [BRIEF, *TALK]),
    "messages-with-another-system": ({"system": "Be long.", "messages": [BRIEF, *TALK]}, [BRIEF, *TALK]),
    "messages-beside-a-target": ({"messages": TALK, "target": "4"}, TALK),
    "messages-in-json": ({"messages": json.dumps([BRIEF, *TALK])}, [BRIEF, *TALK]),
    "question-that-begins-like-json": (
        {"prompt": '[{"a": 1}, is it JSON?', "completion": '[{"a": 1}]'},
        [{"role": "user", "content": '[{"a": 1}, is it JSON?'}, {"role": "assistant", "content": '[{"a": 1}]'}],
    ),
    "messages-in-indented-json": ({"messages": f" {json.dumps(TALK, indent=2)}"}, TALK),
    "a-message-in-json": ({"prompt": json.dumps(ASKED, indent=2), "completion": json.dumps(ANSWERED)}, TALK),
    "an-answer-that-is-json": (
        {"prompt": "Who?", "completion": '{"role": "admin", "content": 3}'},
        [ASKED, {"role": "assistant", "content": '{"role": "admin", "content": 3}'}],
    ),
    "alpaca": ({"instruction": "Who?", "input": "", "output": "The dog."}, TALK),
    "alpaca-with-input": (
        {"instruction": "Who?", "input": "The dog barks.", "output": "The dog."},
        [{"role": "user", "content": "Who?\n\nThe dog barks."}, ANSWERED],
    ),
    "dolly": ({"instruction": "Who?", "context": "", "response": "The dog.", "category": "qa"}, TALK),
    "with-system": ({"system": "Be brief.", "question": "Who?", "answer": "The dog."}, [BRIEF, *TALK]),
    "thoughts": (
        {"messages": [ASKED, {**ANSWERED, "reasoning_content": "hm", "name": None}]},
        [ASKED, {**ANSWERED, "reasoning_content": "hm"}],
    ),
}


def data(folder, name="train.jsonl", **changes):
    return DataConfig(source="files", path=str(folder), **{"train_source": name, "test_source": name, **changes})


def write(folder, rows, name="train.jsonl"):
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_rows_makes_conversations(tmp_path, name):
    row, expected = FORMS[name]
    write(tmp_path, [row, row])
    assert list(load_conversations(data(tmp_path), "train", 0)) == [expected, expected]


def test_a_json_list_parquet_csv_and_a_hub_data_set_give_the_same(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"Who {i}?", "completion": f"The dog, {i}."} for i in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.csv").write_text("prompt,completion\n" + "".join(f'Who {i}?,"The dog, {i}."\n' for i in range(3)))
    split = datasets.Dataset.from_list(rows)
    split.to_parquet(str(tmp_path / "a.parquet"))
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "hub"))
    expected = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    for each in (
        *(data(tmp_path, f"a.{ending}") for ending in ("json", "csv", "parquet")),
        DataConfig(source="hub", hub_id=str(tmp_path / "hub")),
    ):
        assert list(load_conversations(each, "train", 0)) == expected


def test_messages_of_parquet_are_messages(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": TALK}, {"messages": [BRIEF, *TALK]}]).to_parquet(
        str(tmp_path / "a.parquet")
    )
    assert list(load_conversations(data(tmp_path, "a.parquet"), "train", 0)) == [TALK, [BRIEF, *TALK]]


def test_a_named_answer_joins_a_prompt_of_messages(tmp_path):
    write(tmp_path, [{"asked": [ASKED], "reply": "The dog."}])
    named = data(tmp_path, source_column="asked", target_column="reply")
    assert list(load_conversations(named, "train", 0)) == [TALK]


def test_a_named_column_that_would_be_dropped_is_refused(tmp_path):
    write(tmp_path, [{"messages": TALK, "skill": None}, {"messages": TALK, "skill": "talk"}])
    with pytest.raises(
        ValueError, match=r"line 2: skill: expected no answer behind .*'talk'; .* data\.label-column names"
    ):
        load_conversations(data(tmp_path, target_column="skill"), "train", 0)
    assert load_conversations(data(tmp_path, label_column="skill"), "train", 0).labels[1] == "talk"


def test_named_columns_win(tmp_path):
    write(tmp_path, [{"q": "Who?", "about": "It barks.", "a": "The dog.", "messages": [ASKED, ASKED, ANSWERED]}])
    named = data(tmp_path, source_column="q", target_column="a", pair_column="about")
    assert list(load_conversations(named, "train", 0))[0][0]["content"] == "Who?\n\nIt barks."
    assert len(list(load_conversations(data(tmp_path), "train", 0))[0]) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "Assistant", "content": "a"}]}, "message 1: expected the role .*'Assistant'; did you"),
        ({"messages": [ANSWERED, ASKED]}, "expected the user's message first, found assistant"),
        ({"messages": [ASKED, {"role": "assistant", "content": "  "}]}, "message 2: the answer is empty"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "message 2: the answer is empty"),
        ({"messages": [{"role": "user", "content": ""}, ANSWERED]}, "message 1: the question is empty"),
        ({"messages": [ASKED]}, "expected an answer of the assistant, found none"),
        ({"messages": []}, "expected the user's message first, found none"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text"}]}]}, "message 2: expected a text"),
        ({"messages": [ASKED, "The dog."]}, "message 2: expected an object with role and content, found The dog"),
        ({"messages": None}, "message 1: the question is empty"),
        ({"messages": json.dumps(TALK, indent=1)[:-3]}, r"expected a text, or messages in JSON .*; write them by json"),
        ({"messages": json.dumps(ASKED)[:-1]}, "expected a text, or messages in JSON"),
        ({"messages": str(TALK)}, "expected a text, or messages in JSON"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "message 2: weight: expected 1 or none, .*found 0"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": [{"id": "a"}]}]}, "message 2: tool_calls: calls of tools"),
        ({"messages": [ASKED, {"role": "tool", "content": "3"}, ANSWERED]}, "message 2: expected the role .*'tool'"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_line(tmp_path, row, message):
    write(tmp_path, [{"messages": TALK}, row])
    with pytest.raises(ValueError, match=rf"data\.train-source: .*train\.jsonl, line 2.*{message}"):
        load_conversations(data(tmp_path), "train", 0)


@pytest.mark.parametrize("changes", [{"context": ["a", "b"]}, {"system": {"a": "b"}}, {"answer": {"text": ["a"]}}])
def test_a_nested_value_beside_a_question_is_refused_with_its_line(tmp_path, changes):
    row = {"question": "Who?", "context": "It barks.", "answer": "The dog.", "system": "Be brief."}
    write(tmp_path, [row, row | changes])
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 2: {next(iter(changes))}: expected a text"):
        load_conversations(data(tmp_path), "train", 0)


def test_a_weight_of_one_and_no_calls_change_nothing(tmp_path):
    write(tmp_path, [{"messages": [{**ASKED, "tool_calls": None}, {**ANSWERED, "weight": 1, "tool_calls": []}]}])
    assert list(load_conversations(data(tmp_path), "train", 0)) == [TALK]


def test_a_cut_list_is_refused_with_the_line_of_the_file(tmp_path):
    (tmp_path / "train.json").write_text(f"\n\n{json.dumps([{'messages': TALK}], indent=1)[:-1]}")
    with pytest.raises(ValueError, match=r"train\.json: expected a JSON list of objects, .*line 15 column"):
        load_conversations(data(tmp_path, "train.json"), "train", 0)


@pytest.mark.parametrize("answer", [None, "", " "])
def test_an_empty_answer_of_a_table_is_refused_with_its_line(tmp_path, answer):
    write(tmp_path, [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": answer}])
    with pytest.raises(ValueError, match=r"line 2, message 2: the answer is empty"):
        load_conversations(data(tmp_path), "train", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_source": "b.txt"}, "expected a table"),
        ({"source_column": "massages"}, "no column 'massages', found messages, note; did you mean 'messages'"),
        ({"label_column": "skill"}, "data.label-column: .*no column 'skill'"),
        (
            {"target_column": "nots"},
            "data.target-column: .*no column 'nots', found messages, note; did you mean 'note'",
        ),
        ({"pair_column": "note"}, "data.pair-column: the conversations of the column messages say .* found 'note'"),
        ({"train_target": "b.txt"}, "data.train-target: conversations stand in one table"),
    ],
)
def test_a_place_without_conversations_is_refused(tmp_path, changes, message):
    write(tmp_path, [{"messages": TALK, "note": "short"}])
    (tmp_path / "b.txt").write_text("a\n")
    with pytest.raises(ValueError, match=message):
        load_conversations(data(tmp_path, **changes), "train", 0)


def test_texts_alone_are_no_conversations(tmp_path):
    write(tmp_path, [{"text": "a"}])
    with pytest.raises(ValueError, match=r"data\.source-column: .*expected a column of messages, .*found text"):
        load_conversations(data(tmp_path), "train", 0)


def test_generated_sentences_and_their_translations_are_conversations():
    (first, *_), (again, *_) = (list(load_conversations(DataConfig(num_examples=3), "train", seed)) for seed in (0, 1))
    assert first[0]["content"].startswith("Translate: ") and first[1]["role"] == "assistant" and first != again


def test_a_translation_and_few_answers_are_no_instructions():
    texts = [f"text {i}" for i in range(9)]
    assert find_columns({"input": texts, "output": texts}) is None
    assert find_columns({"input": texts, "output": texts, "system": texts}).system == "system"
    assert find_columns({"prompt": texts, "completion": texts}, are_classes=lambda values: True) is None


def test_a_subset_keeps_its_places_and_classes(tmp_path):
    write(tmp_path, [{"messages": TALK, "skill": name} for name in "abc"])
    some = load_conversations(data(tmp_path, label_column="skill"), "train", 0).subset([2, 0])
    assert list(some.classes()) == ["c", "a"] and some.place(0).endswith("line 3") and len(some) == 2


def test_a_question_is_a_text_or_messages():
    assert question_of("Who?") == [ASKED]
    assert question_of(json.dumps([BRIEF, ASKED])) == question_of([BRIEF, ASKED]) == [BRIEF, ASKED]
    with pytest.raises(ValueError, match="expected the user's message last, found assistant's"):
        question_of(TALK)
    with pytest.raises(ValueError, match="expected a text, or messages in JSON"):
        question_of('[{"role": "user"')
    with pytest.raises(ValueError, match=r"predict, message 1: expected a text, found '\\ud83d', half of a pair"):
        question_of(r'[{"role": "user", "content": "a \ud83d b"}]')
