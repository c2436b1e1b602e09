"""Conversations in tables and hub datasets: messages, prompts with completions, instructions, ShareGPT's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_pipeline.documents import json_value
from client_pipeline.near_names import did_you_mean
from flower_app.tasks.data import tables
from flower_app.tasks.data.corpus import Classes, DataConfig, file_of, hub_table, length_classes, load_pairs
from flower_app.tasks.data.texts import Indices, Texts, check_format, ending, subset

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)
Message = dict[str, str]
"""One message: its ``role``, its ``content``, and the model's thoughts where the data has them."""

_ROLES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
"""Other names of roles."""
_SPEAKERS = (("role", "content"), ("from", "value"), ("role", "value"), ("speaker", "text"))
"""Names of the role and the text of a message."""
_TOOLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_ANSWERS = ("completion", "output", "response", "answer", "answers", "reply", "target", "solution")
_FORMS = (
    ("a prompt with its completion", ("prompt",), ("completion",)),
    ("an instruction with its answer", ("instruction", "instructions"), _ANSWERS),
    ("a question with its answer", ("prompt", "query", "question", "problem", "input", "user"), _ANSWERS),
    ("a question with its answer", ("user", "human", "inputs"), ("assistant", "bot", "targets")),
)
"""Form of the rows, and the names of the columns of questions and of answers."""
_CONTEXTS = ("input", "context")
_PAIR_OF_A_TRANSLATION = {"input", "output", "target"}


@dataclass(frozen=True, kw_only=True)
class ChatColumns:
    """Columns of a table that make conversations."""

    form: str
    """For a person, such as ``messages``."""
    question: str
    """Column of whole conversations, or of what stands before their answers."""
    answer: str = ""
    """Column of answers, for conversations that end with a question; empty: there is none."""
    context: str = ""
    """Column of what an instruction is about; empty: none."""
    system: str = ""
    """Column of the system's messages, for conversations that begin with none; empty: there is none."""

    def check_context(self, key: str, column: str) -> None:
        """Raise ``ValueError`` where a column of what questions are about is named that conversations do not read."""
        if column and column != self.context:
            raise ValueError(
                f"{key}: the conversations of the column {self.question} say what they are about themselves; leave it "
                f"out, found {column!r}"
            )

    def messages(self, row: Mapping[str, Any], place: str) -> list[Message]:
        """Return the messages of a row.

        Raises
        ------
        ValueError
            If one of its values is of another kind; with its place.
        """
        messages: list[Message] = []
        system, context = (_text(row.get(name), f"{place}: {name}") for name in (self.system, self.context))
        question = _messages(row.get(self.question), USER, f"{place}: {self.question}")
        has_system = bool(question) and question[0]["role"] == SYSTEM
        if system.strip() and not has_system:
            messages.append({"role": SYSTEM, "content": system})
        if context.strip():
            question[-1]["content"] += f"\n\n{context}"
        messages += question
        if self.answer and not (question and question[-1]["role"] == ASSISTANT):
            messages += _messages(row.get(self.answer), ASSISTANT, f"{place}: {self.answer}")
        elif self.answer not in ("", DataConfig.target_column) and not tables.is_missing_label(row.get(self.answer)):
            raise ValueError(
                f"{place}: {self.answer}: expected no answer behind a conversation that ends with one, found "
                f"{str(row.get(self.answer))[:60]!r}; leave out data.target-column; data.label-column names the "
                "classes that data.partition goes by"
            )
        return messages


def _messages(value: Any, role: str, place: str) -> list[Message]:
    """Return the messages of a cell; a text that is none in JSON is one message of ``role``."""
    value = _turns(value, place)
    if not isinstance(value, list):
        return [{"role": role, "content": _text(value, place)}]
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict) or (names := _speaker(turn)) is None:
            raise ValueError(
                f"{place}, message {number}: expected an object with role and content, found {str(turn)[:60]}"
            )
        spoken, content = (turn.get(name) for name in names)
        if content is not None and not isinstance(content, str):
            raise ValueError(f"{place}, message {number}: expected a text, found {str(content)[:60]}")
        if tool := next((name for name in _TOOLS if turn.get(name)), None):
            raise ValueError(
                f"{place}, message {number}: {tool}: calls of tools are not learned, found {str(turn[tool])[:60]}; "
                "remove the row"
            )
        if turn.get("weight") not in (None, 1):
            raise ValueError(
                f"{place}, message {number}: weight: expected 1 or none, for task.loss-on says which answers count, "
                f"found {turn['weight']!r}; remove the key, or the row"
            )
        thoughts = {name: turn[name] for name in _THOUGHTS if isinstance(turn.get(name), str)}
        messages.append({"role": _ROLES.get(str(spoken), str(spoken)), "content": content or "", **thoughts})
    return messages


def _text(value: Any, place: str) -> str:
    """Return a cell's text; empty where there is none."""
    if isinstance(value, list | dict):
        raise ValueError(f"{place}: expected a text or a list of messages, found {str(value)[:60]}; write a text")
    return "" if tables.is_missing(value) else str(value)


def _turns(value: Any, place: str) -> Any:
    """Return a cell's value; where it is messages in JSON, as a CSV file has them, these.

    Raises
    ------
    ValueError
        For messages in broken JSON, or as Python prints them.
    """
    if not isinstance(value, str) or not re.match(r"\s*(\[\s*)?\{", value):
        return value
    try:
        turns = json_value(value)
    except ValueError as error:
        keys = set(re.findall(r"['\"](\w+)['\"]\s*:", value))
        if re.match(r"\s*\[\s*\{\s*['\"](role|from|speaker)['\"]", value) or any(keys >= {*n} for n in _SPEAKERS):
            raise ValueError(
                f"{place}: expected a text, or messages in JSON ({error}), found {value[:60]!r}; write them by "
                "json.dumps"
            ) from error
        return value
    if isinstance(turns, list):
        return turns if _speaker(turns[0]) else value
    # An answer may well be an object of its own.
    names = _speaker(turns)
    return [turns] if names and _ROLES.get(str(turns[names[0]]), turns[names[0]]) in ROLES else value


def _speaker(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((names for names in _SPEAKERS if turn.keys() >= {*names}), None)


def check_messages(messages: Sequence[Message], place: str, answered: bool = True) -> None:
    """Refuse a conversation that nothing can be learned from.

    Parameters
    ----------
    messages : of the conversation
    place : for messages of mistakes
    answered : whether it has an answer; else it ends with a question

    Raises
    ------
    ValueError
        Naming the message, what was found and what was expected.
    """
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES:
            raise ValueError(
                f"{place}, message {number}: expected the role {', '.join(ROLES[:-1])} or {ROLES[-1]}, found {role!r}"
                f"{did_you_mean(role, ROLES)}; rename it, or remove the row"
            )
        try:
            "".join(message.values()).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place}, message {number}: expected a text, found {error.object[error.start]!r}, half of a pair of "
                "surrogates; write the whole character"
            ) from error
        if role != SYSTEM and not message["content"].strip():
            name = "answer" if role == ASSISTANT else "question"
            raise ValueError(f"{place}, message {number}: the {name} is empty; write one, or remove the row")
    spoken = [message["role"] for message in messages if message["role"] != SYSTEM]
    if not spoken or spoken[0] != USER:
        raise ValueError(
            f"{place}: expected the user's message first, found {spoken[0] if spoken else 'none'}; remove the row"
        )
    if answered and ASSISTANT not in spoken:
        raise ValueError(f"{place}: expected an answer of the assistant, found none; remove the row")
    if not answered and spoken[-1] != USER:
        raise ValueError(f"{place}: expected the user's message last, found {spoken[-1]}'s; leave the answer out")


def find_columns(
    columns: Mapping[str, Sequence[Any]],
    question: str = "",
    answer: str = "",
    context: str = "",
    are_classes: Callable[[Sequence[Any]], bool] = lambda values: False,
) -> ChatColumns | None:
    """Find the columns that make conversations; None: there are none.

    Parameters
    ----------
    columns : by name
    question, answer, context : names that are known already; empty: by the usual names
    are_classes : tells whether answers are a few labels, which are classified instead
    """
    names = {name.lower(): name for name in columns}
    system = next((names[name] for name in ("system", "system_prompt") if name in names), "")
    lists = {name: form for name, values in columns.items() if (form := _form_of_lists(values))}
    if question in lists or (not question and lists):
        question = question or ("prompt" if "prompt" in lists else next(iter(lists)))
        if question == "prompt" and answer not in columns:
            answer = "completion"
        if answer not in columns or answer == question:
            return ChatColumns(form=lists[question], question=question, system=system)
        return ChatColumns(form="a prompt with its completion", question=question, answer=answer, system=system)
    for form, questions, answers in _FORMS:
        asked = question or next((names[name] for name in questions if name in names), "")
        known = answer if answer in columns else ""
        replied = known or next((names[name] for name in answers if name in names and names[name] != asked), "")
        is_translation = not (question or system) and {asked.lower(), replied.lower()} <= _PAIR_OF_A_TRANSLATION
        if not (asked and replied) or is_translation:
            continue
        if "instruction" in asked.lower() or question or not are_classes(columns[replied]):
            others = [names[name] for name in _CONTEXTS if name in names and names[name] not in (asked, replied)]
            context = context or (others[0] if others and not question else "")
            return ChatColumns(form=form, question=asked, answer=replied, context=context, system=system)
    return None


def _form_of_lists(values: Sequence[Any]) -> str:
    """Return the form of a column of conversations, for a person; empty: it has none."""
    try:
        turns = _turns(next((value for value in values if value and not tables.is_missing(value)), None), "")
    except ValueError:
        # Reading the row says what is wrong.
        return "messages"
    speaker = _speaker(turns[0]) if isinstance(turns, list) and isinstance(turns[0], dict) else None
    if speaker is None:
        return ""
    return "messages" if speaker[0] == "role" else "conversations of ShareGPT's form"


@dataclass(frozen=True)
class Conversations:
    """Conversations of one split; they lie on disk."""

    texts: Sequence[str]
    """Messages of each, in JSON."""
    place: Callable[[int], str]
    """Return the place of one in its file, for messages."""
    labels: Sequence[str] | None = None
    """The label column, where one is configured: the class that ``data.partition`` goes by (a skill, say)."""

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[list[Message]]:
        return map(json.loads, self.texts)

    def classes(self) -> Classes:
        """Return each conversation's class: the label column, or the length in classes of like size."""
        return length_classes(self.texts) if self.labels is None else self.labels

    def subset(self, indices: Indices) -> Conversations:
        """Return some of the conversations."""
        labels = None if self.labels is None else subset(self.labels, indices)
        return Conversations(subset(self.texts, indices), lambda row: self.place(int(indices[row])), labels)


def load_conversations(data: DataConfig, split: str, seed: int, cluster: int | None = None) -> Conversations:
    """Load one split.

    Parameters
    ----------
    data : where the conversations are: a table, a hub dataset, or generated sentences with their translations
    split : ``train``, ``validation`` or ``test``; of the last two, one stands for the other where that is missing
    seed : of the run; generated training text depends on it
    cluster : with ``partition = files``, whose training file

    Raises
    ------
    ValueError
        For a missing, damaged or empty file, columns that make no conversations, or a row that is none; with the key,
        the file and the line.
    """
    if data.source == "generated":
        pairs = load_pairs(data, split, seed)
        talks = (
            [{"role": USER, "content": f"Translate: {source}"}, {"role": ASSISTANT, "content": target}]
            for source, target in zip(pairs.sources, pairs.targets, strict=True)
        )
        return Conversations(Texts(map(json.dumps, talks)), lambda row: f"generated sentence {row}")
    if data.source == "hub":
        table, key = hub_table(data, split, {}), "data.hub-id"
    else:
        path, target, key = file_of(data, split, cluster)
        if target is not None:
            raise ValueError(
                f"{key.replace('-source', '-target')}: conversations stand in one table, {key}; leave it empty, found "
                f"{target}"
            )
        check_format(path, key)
        if ending(path) not in tables.TABLES:
            raise ValueError(f"{key}: expected a table ({', '.join(tables.TABLES)}, .json), found {path}")
        table = tables.read_columns(path, key, not data.source_column.isdigit())
    columns = table.columns
    named = {"source": data.source_column, "pair": data.pair_column, "target": data.target_column}
    if split == "train":
        named["label"] = data.label_column
    for name, column in named.items():
        # The usual name of a target may be missing: it is one of several.
        if column and column not in columns and (name, column) != ("target", DataConfig.target_column):
            raise ValueError(
                f"data.{name}-column: {table.place(0)}: no column {column!r}, found {', '.join(columns)}"
                f"{did_you_mean(column, columns)}"
            )
    found = find_columns(columns, data.source_column, data.target_column, data.pair_column)
    if found is None:
        raise ValueError(
            f"data.source-column: {table.place(0)}: expected a column of messages, or one of questions with the "
            f"answers in data.target-column, found {', '.join(columns)}"
        )
    found.check_context("data.pair-column", data.pair_column)

    def texts() -> Iterator[str]:
        for row, values in enumerate(zip(*columns.values(), strict=True)):
            place = f"{key}: {table.place(row)}"
            messages = found.messages(dict(zip(columns, values, strict=True)), place)
            check_messages(messages, place)
            yield json.dumps(messages, ensure_ascii=False)

    labels = None
    if data.label_column and split == "train":
        labels = Texts(map(str, columns[data.label_column]))
    return Conversations(Texts(texts()), lambda row: f"{key}: {table.place(row)}", labels)


def question_of(value: Any, place: str = "predict") -> list[Message]:
    """Return a user's input as messages: a text, messages, or these in JSON.

    Raises
    ------
    ValueError
        If it is none of these, or does not end with a question.
    """
    messages = _messages(value, USER, place)
    check_messages(messages, place, answered=False)
    return messages
