"""``collapipe init``: conversations in their forms, and an example as the model sees it."""

import json
import tomllib
from pathlib import Path

import pytest

from flower_app.tasks import chat_template
from helpers.chat_cases import rendered_here, save_chat_model
from helpers.command_line import init, write_rows

TEXTS = [f"the {'red' if i % 3 else 'blue'} pump number {i} works" for i in range(40)]
TURNS = [[{"role": "user", "content": text}, {"role": "assistant", "content": "It does."}] for text in TEXTS]

pytestmark = pytest.mark.usefixtures("elsewhere", "here")


@pytest.fixture
def here(monkeypatch):
    """Render in this process."""
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)


@pytest.mark.parametrize(
    ("form", "columns", "row"),
    [
        (
            "an instruction with its answer in the columns instruction, output",
            {"source": "instruction", "target": "output"},
            lambda i: {"instruction": TEXTS[i], "output": f"{TEXTS[i]}."},
        ),
        (
            "an instruction with its answer in the columns instruction, context, response",
            {"source": "instruction", "pair": "context", "target": "response"},
            lambda i: {"instruction": TEXTS[i], "context": "", "response": f"{i} does.", "category": "ab"[i % 2]},
        ),
        (
            "a prompt with its completion in the columns prompt, completion",
            {"source": "prompt", "target": "completion"},
            lambda i: {"prompt": TEXTS[i], "completion": f" {TEXTS[-i]}"},
        ),
        (
            "a question with its answer in the columns system, question, answer",
            {"source": "question", "target": "answer"},
            lambda i: {"system": "Be brief.", "question": f"{TEXTS[i]}?", "answer": f"#### {i} dogs"},
        ),
        ("messages in the column messages", {"source": "messages"}, lambda i: {"messages": TURNS[i], "n": "ab"[i % 2]}),
        (
            "conversations of ShareGPT's form in the column conversations",
            {"source": "conversations"},
            lambda i: {"id": i, "conversations": [{"from": "human", "value": TEXTS[i]}, {"from": "gpt", "value": "a"}]},
        ),
        ("messages in the column dialog", {"source": "dialog"}, lambda i: {"dialog": TURNS[i]}),
    ],
)
def test_each_form_is_recognised_and_said(form, columns, row):
    write_rows("train.jsonl", list(map(row, range(40))))
    code, told = init("train.jsonl")
    assert code == 0 and f"task: instruction ({form})" in told, told
    written = tomllib.loads(Path("collapipe.toml").read_text())
    found = {key.removesuffix("-column"): value for key, value in written["data"].items() if key.endswith("-column")}
    assert found == columns and "chat-template" not in written["task"]
    example = told.partition("with what counts between ⟦ and ⟧:\n")[2]
    assert example.startswith("<|im_start|>") and "<|im_start|>assistant\n⟦" in example
    assert "<|im_end|>\n⟧" in example


def test_labels_beside_conversations_are_not_taken_for_answers():
    write_rows("train.jsonl", [{"messages": turns, "label": "ab"[i % 2]} for i, turns in enumerate(TURNS)])
    code, told = init("train.jsonl", "--task", "instruction", "--label-column", "label")
    assert code == 2 and "row 1: label: expected no answer behind a conversation that ends with one, found 'a'" in told
    code, told = init("train.jsonl")
    assert code == 0 and "not used: label" in told


def test_answers_that_are_good_or_bad_are_not_all_learned_without_a_word():
    write_rows("train.jsonl", [{"prompt": text, "completion": "a", "label": i % 2 > 0} for i, text in enumerate(TEXTS)])
    code, told = init("train.jsonl")
    assert code == 2 and "the column label says yes or no of each answer (unpaired preference data)" in told
    code, told = init("train.jsonl", "--task", "instruction")
    assert code == 0 and "not used: label" in told


def test_alpacas_json_with_a_model_becomes_a_run_of_adapters(tmp_path):
    rows = [
        {"instruction": text, "input": text if i % 2 else "", "output": f"It {i} does."} for i, text in enumerate(TEXTS)
    ]
    Path("alpaca.json").write_text(json.dumps(rows))
    folder = save_chat_model(tmp_path / "model", "gemma")
    code, told = init("alpaca.json", "--pretrained", folder)
    assert code == 0, told
    written = tomllib.loads(Path("collapipe.toml").read_text())
    assert written["model"]["trainable"] == "lora" and "chat-template" not in written["task"]
    assert "<start_of_turn>model\n⟦It 0 does.<end_of_turn>\n⟧" in told
    # The longest conversation fits.
    assert written["data"]["max-length"] % 8 == 0 and written["data"]["validation-source"] == "validation.jsonl"


def test_a_bad_row_is_refused_at_its_place_in_the_users_file():
    turns = [*TURNS[:20], [TURNS[0][1]], *TURNS[20:]]
    write_rows("train.jsonl", [{"messages": each} for each in turns])
    code, told = init("train.jsonl")
    assert code == 2 and "train.jsonl, line 21: expected the user's message first, found assistant" in told
    assert not Path("collapipe.toml").exists()


def test_a_task_of_conversations_needs_some():
    write_rows("train.jsonl", [{"text": text} for text in TEXTS])
    code, told = init("train.jsonl", "--task", "instruction")
    assert code == 2 and "expected a column of messages, or of questions with their answers, found text" in told


def test_a_second_column_beside_messages_is_refused():
    write_rows("train.jsonl", [{"messages": each, "note": "short"} for each in TURNS])
    code, told = init("train.jsonl", "--task", "instruction", "--pair-column", "note")
    assert code == 2 and "--pair-column: the conversations of the column messages say" in told


@pytest.mark.parametrize("marks", [(True, False), ("True", "False"), (1, 0), (True, True)])
def test_completions_that_are_rated_are_no_instructions(marks):
    rows = [{"prompt": text, "completion": f"It {i} does.", "label": marks[i % 2]} for i, text in enumerate(TEXTS)]
    write_rows("train.jsonl", rows)
    code, told = init("train.jsonl")
    assert code == 2 and "unpaired preference data" in told, told
    # Another label is a class of the instruction.
    write_rows("train.jsonl", [row | {"label": "ab"[i % 2]} for i, row in enumerate(rows)])
    assert init("train.jsonl")[0] == 0
