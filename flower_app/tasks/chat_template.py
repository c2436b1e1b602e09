"""Chat templates: how a conversation becomes tokens, and which of them count."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from flower_app.tasks import chat_renderer
from flower_app.tasks.chat_renderer import MARKED, MEMORY_BYTES, MOST_CHARACTERS, PROCESSOR_S
from flower_app.tasks.data.conversations import ASSISTANT, SYSTEM, USER, Message
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tokenizer_files import file_object, named_tokens

logger = logging.getLogger("flwr.collapipe.text")

KEY = "task.chat-template"
TEMPLATE_FILE = "chat_template.jinja"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MARK = re.compile(r"<([|\uff5c])[^|\uff5c<>\s]+\1>|(?<!<)</?[A-Za-z_]\w*>(?!>)|\[/?[A-Z_]+\]")
"""Marks as templates write them: ``<|im_start|>``, the same with full-width bars, ``<start_of_turn>``, ``[INST]``."""
_LONGEST_LINE = 24 * MOST_CHARACTERS
"""Longest answer of the program that renders: JSON writes a character in twelve at most, a place in twenty."""
_QUESTION, _ANSWER = "Question 1", "Answer 2"
"""Contents of a conversation that shows what a template writes around them."""
_ANSWERED: Message = {"role": ASSISTANT, "content": _ANSWER}

Span = tuple[int, int]
"""Places in a text, from and to."""
Render = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[tuple[str, list[Span]]]]
"""Renders messages, each with or without the beginning of an answer behind them: texts, and what a template marks."""


class RenderingFailed(ValueError):
    """A conversation that a template does not take, by the template's own words."""


class Counted(NamedTuple):
    """A conversation as the model sees it."""

    text: str
    ids: list[int]
    is_counted: list[bool]
    """For each token: it has a loss."""
    places: list[Span]
    """Place of each token in the text."""
    is_rewritten: bool
    """The template changes earlier answers, so the last one counts alone."""

    def marked(self) -> str:
        """Return the text with what counts between ⟦ and ⟧."""
        marked, end = "", 0
        for counts, group in groupby(zip(self.is_counted, self.places, strict=True), key=itemgetter(0)):
            start, end = end, max(last for _, (_, last) in group)
            marked += f"⟦{self.text[start:end]}⟧" if counts else self.text[start:end]
        return marked + self.text[end:]


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the tokenizer that reads what it writes."""

    template: str
    tokenizer: TextTokenizer
    """Its settings have the template, the date and the ends."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> ChatTemplate:
        """Take the template that is among a tokenizer's settings."""
        return cls(tokenizer.settings.files[TEMPLATE_FILE], tokenizer)

    @classmethod
    def chosen(cls, tokenizer: TextTokenizer, name: str, day: str) -> ChatTemplate:
        """Put a template and the run's date among a tokenizer's settings.

        Parameters
        ----------
        tokenizer : to read what the template writes
        name : ``task.chat-template``: a file, ``chatml``, or empty for the tokenizer's own
        day : ``task.date``, which templates write; empty: today

        Raises
        ------
        ValueError
            If there is no template.
        """
        template = _text_of(name) if name else own_template(tokenizer)
        if not template:
            raise ValueError(
                f"{KEY}: expected chatml or a file, for the tokenizer has no chat template of its own, found none"
            )
        settings = tokenizer.settings
        day = day or settings.date or date.today().isoformat()
        return cls.of(tokenizer.with_settings(files={**settings.files, TEMPLATE_FILE: template}, date=day))

    @property
    def has_marks(self) -> bool:
        """True if the template itself marks what the model writes."""
        return bool(MARKED.search(self.template))

    @contextmanager
    def renderer(self) -> Iterator[Render]:
        """Start the program that renders, and end it."""
        day = self.tokenizer.settings.date
        header = {"template": self.template, "variables": self._variables(), "day": day}
        with answering_program(header) as ask:

            def render(jobs: Sequence[tuple[Sequence[Message], bool]]) -> list[tuple[str, list[Span]]]:
                rendered = ask([{"messages": messages, "prompt": prompt} for messages, prompt in jobs])
                if rendered and isinstance(rendered[-1], str):
                    raise RenderingFailed(rendered[-1])
                return [(text, [(start, end) for start, end in spans]) for text, spans in rendered]

            yield render

    def checked(self, render: Render, *, gets_marks: bool, needs_marks: bool) -> ChatTemplate:
        """Try the template, and put its ends among the tokenizer's.

        Parameters
        ----------
        render : a renderer of this template
        gets_marks : whether the tokenizer gets the template's marks as tokens: it was trained on the run's text
        needs_marks : whether it must have them: the template is new to a model that cannot learn marks

        Raises
        ------
        ValueError
            If the template cannot be used, or its marks are not there.
        """
        question: Message = {"role": USER, "content": _QUESTION}
        try:
            (before, _), (after, _) = render([([question], True), ([question, _ANSWERED], False)])
        except RenderingFailed as error:
            raise ValueError(f"{KEY}: the template refuses a question and its answer: {error}") from error
        if _QUESTION not in before or _ANSWER not in after:
            raise ValueError(f"{KEY}: the template leaves out what is asked or answered: {after[:200]!r}")
        try:
            ((with_system, _),) = render([([{"role": SYSTEM, "content": "Rule 3"}, question, _ANSWERED], False)])
        except RenderingFailed:
            # The template takes none.
            with_system = ""
        shown = f"{before}\n{after}\n{with_system}"
        tokenizer, marks = self.tokenizer, sorted({match[0] for match in _MARK.finditer(shown)})
        if gets_marks:
            tokenizer = tokenizer.with_tokens(marks)
        for mark in marks:
            if (number := len(tokenizer.encode_places(mark)[0])) == 1:
                continue
            written = f"{KEY}: the template writes {mark}, which is {number} tokens of the tokenizer"
            if needs_marks:
                raise ValueError(
                    f"{written}; new marks are learned where all weights are trained alone: set "
                    'model.trainable = "full", or choose a template with marks that the tokenizer has'
                )
            logger.warning("%s: the model reads it as text", written)
        behind = after.rpartition(_ANSWER)[2]
        ends = [i for i in tokenizer.encode_places(behind)[0] if i in tokenizer.special_ids][:1]
        turn_end = None if ends else behind.strip()
        ends = list(dict.fromkeys([*tokenizer.end_ids, *ends]))
        return replace(self, tokenizer=tokenizer.with_settings(ends=tuple(ends), turn_end=turn_end))

    def prompt(self, render: Render, messages: Sequence[Message]) -> list[int]:
        """Return the ids that an answer follows."""
        return self.tokenizer.encode_places(render([(messages, True)])[0][0])[0]

    def length(self, render: Render, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a conversation."""
        return len(self.tokenizer.encode_places(render([(messages, False)])[0][0] + self._end)[0])

    def counted(self, render: Render, messages: Sequence[Message], loss_on: str) -> Counted:
        """Encode a conversation, and find what counts.

        Parameters
        ----------
        render : a renderer of this template
        messages : of the conversation
        loss_on : ``assistant``, ``last-answer`` or ``all``

        Raises
        ------
        RenderingFailed
            If the template refuses it, or writes it so that no answer can be told from its question.
        """
        if loss_on == "all":
            ((text, _),) = render([(messages, False)])
            spans, is_rewritten = [(0, len(text))], False
        elif self.has_marks:
            text, spans = self._marked(render, messages, loss_on)
            is_rewritten = False
        else:
            text, spans, is_rewritten = _behind_prompts(render, messages, loss_on)
        ended = text + self._end
        spans = [(start, len(ended) if end == len(text) else end) for start, end in spans]
        ids, places = self.tokenizer.encode_places(ended)
        is_counted = _within(places, spans)
        for at in range(1, len(ids)):
            # The end of an answer is learned, also where the template's own mark leaves it out.
            is_counted[at] |= is_counted[at - 1] and ids[at] in self.tokenizer.end_ids
        # Nothing comes before the first token.
        return Counted(ended, ids, [False, *is_counted[1:]], places, is_rewritten)

    @property
    def _end(self) -> str:
        """Token behind the last answer, where the template writes none at which an answer ends."""
        return "" if self.tokenizer.settings.turn_end is None else self.tokenizer.token(self.tokenizer.eos_id)

    def _marked(self, render: Render, messages: Sequence[Message], loss_on: str) -> tuple[str, list[Span]]:
        ((text, spans),) = render([(messages, False)])
        if not any(end > start for start, end in spans):
            raise RenderingFailed("the template marks nothing of the answers as the model's own ({% generation %})")
        if loss_on == "last-answer":
            last = max(i for i, message in enumerate(messages) if message["role"] == ASSISTANT)
            ((before, _),) = render([(messages[:last], True)])
            within = [span for span in spans if span[0] >= len(before)] if text.startswith(before) else []
            spans = within or spans[-1:]
        return text, spans

    def _variables(self) -> dict[str, str]:
        """Return the names that the library gives a template: the special tokens."""
        files = self.tokenizer.settings.files
        if "tokenizer_config.json" in files:
            return named_tokens(files)
        roles = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        return {name: self.tokenizer.token(i) for name, i in roles.items()}


def _behind_prompts(render: Render, messages: Sequence[Message], loss_on: str) -> tuple[str, list[Span], bool]:
    """Find the answers as what a text has more than the prompt before it.

    Returns
    -------
    The whole text, the places of its answers, and whether the last counts alone because earlier ones are rewritten.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if loss_on == "last-answer":
        answers = answers[-1:]
    ((text, _),) = render([(messages, False)])
    spans = []
    for i in answers:
        # One answer at a time: the bounds are those of a line.
        (before, _), (after, _) = render([(messages[:i], True), (messages[: i + 1], False)])
        is_prefix = text.startswith(after) and after.startswith(before) and len(after) > len(before)
        spans.append((len(before), len(after)) if is_prefix else None)
    if spans[-1] is None:
        raise RenderingFailed(
            "the template writes the last answer so that its prompt is not its beginning, so nothing says what counts; "
            'mark the answers in it ({% generation %}), or set task.loss-on = "all"'
        )
    whole = [span for span in spans if span is not None]
    return (text, whole, False) if len(whole) == len(spans) else (text, whole[-1:], True)


def _within(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each place whether it shares a character with a span; both are gone through once."""
    ordered, at = sorted(spans), 0
    is_within = []
    for start, end in places:
        while at < len(ordered) and ordered[at][1] <= start:
            at += 1
        is_within.append(at < len(ordered) and ordered[at][0] < end)
    return is_within


@contextmanager
def answering_program(header: Mapping[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """Start :mod:`flower_app.tasks.chat_renderer`; yields a function that sends it a line and gives its answer."""
    # By its path, with none of this project's modules in the way of the library's.
    command = [sys.executable, "-P", str(Path(chat_renderer.__file__))]
    # Threads of the numerical libraries would take address space alone.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, env=environment) as program:
        questions, answers = program.stdin, program.stdout
        assert questions is not None and answers is not None

        def ask(jobs: Any) -> Any:
            try:
                print(json.dumps(jobs), file=questions, flush=True)
                line = answers.readline(_LONGEST_LINE)
            except BrokenPipeError:
                line = ""
            if line.endswith("\n"):
                return json.loads(line)
            if line:
                program.kill()
            bounds = f"{PROCESSOR_S} s of processor time and {MEMORY_BYTES >> 20} MiB of memory"
            ended = program.wait()
            reason = "was ended by the system" if ended in (-signal.SIGXCPU, -signal.SIGKILL) else f"ended ({ended})"
            raise RenderingFailed(
                f"the program that renders the template {reason}; its bounds are {bounds} for a conversation: "
                f"correct the template ({KEY}), or shorten the conversation"
            )

        try:
            print(json.dumps(header), file=questions, flush=True)
            yield ask
        finally:
            program.kill()
            # Else closing it would write what the program has not read.
            with suppress(BrokenPipeError):
                questions.close()


def own_template(tokenizer: TextTokenizer) -> str:
    """Return the chat template that a tokenizer's files have; empty: there is none."""
    files = tokenizer.settings.files
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE]
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = file_object(files, name).get("chat_template")
        if isinstance(template, list):
            # Several with names, the usual one among them.
            by_name = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = by_name.get("default")
        if isinstance(template, str):
            return template
    return ""


def _text_of(chosen: str) -> str:
    if chosen == "chatml":
        return CHATML
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{KEY}: expected chatml or a file with a template, found {chosen!r} ({error})") from error
