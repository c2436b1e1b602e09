"""Instruction tuning: a decoder learns an assistant's answers, in the form of a chat template."""

from __future__ import annotations

import logging
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.families.families import max_length
from client_pipeline.partition.parts import IGNORED_LABEL, ModelParts
from client_pipeline.partition.spec import CAUSAL_LM
from flower_app.tasks.answer_scores import find_scorers, metric_name, scorer_names
from flower_app.tasks.base import ModelConfig, PackagedTask, Prepared, Score, TaskConfig
from flower_app.tasks.chat_template import ChatTemplate, Counted, Render, RenderingFailed
from flower_app.tasks.continued import continued
from flower_app.tasks.data.conversations import ASSISTANT, USER, Conversations, Message, load_conversations, question_of
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.data_split import training_share, training_shares
from flower_app.tasks.encoded import EncodedText, check_known, num_scored
from flower_app.tasks.labelled import LabelledData
from flower_app.tasks.language_model import LanguageModelEvaluator
from flower_app.tasks.packing import PackedData, packed_rows
from flower_app.tasks.start import check_model, load_start, ready_tokenizer
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer

logger = logging.getLogger("flwr.collapipe.text")

_CHECKED = 200
"""Training conversations of each file that the server itself renders; the clusters render all of theirs."""
_SHOWN = 10
"""Answers that the report shows."""


@dataclass(frozen=True)
class _Loaded:
    sizes: tuple[int, ...]
    """Training conversations of each cluster."""
    held_out: dict[str, Conversations]
    chat: ChatTemplate
    render: Render


class _Kept(NamedTuple):
    counted: Counted
    messages: list[Message]
    num_dropped: int
    """Messages behind these that do not fit."""
    num_unanswered: int
    """Messages behind the last answer, which are left out."""


class InstructionTask(PackagedTask):
    """Conversations from tables or the hub; the loss counts what ``task.loss-on`` says."""

    name = "instruction"
    head = CAUSAL_LM

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the metrics: of the tokens that count, and of the answers that are written."""
        return ("loss", "perplexity", *map(metric_name, scorer_names(self.config.evaluate_generate)))

    # The task's protocol, flower_app.tasks.base.Task.

    def check(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and render some of it."""
        with self._loaded(data, model, seed, num_clusters):
            pass

    def prepare(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Prepared:
        """Load conversations, tokenizer and template, and size or load the model.

        Raises
        ------
        ValueError
            For all that cannot be loaded or rendered, or a cluster without a conversation.
        """
        with self._loaded(data, model, seed, num_clusters) as loaded:
            evaluator = InstructionEvaluator(self, data, loaded.held_out, loaded.chat, loaded.render)
        tokenizer = loaded.chat.tokenizer
        spec, weights = load_start(self.head, model, tokenizer, seed)
        return Prepared(
            spec=spec,
            tokenizer_json=tokenizer.to_json(),
            evaluator=evaluator,
            cluster_sizes=loaded.sizes,
            weights=weights,
        )

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> LabelledData | PackedData:
        """Load and encode one cluster's share of the training conversations."""
        conversations, _ = training_share(
            data, partial(load_conversations, data, "train", seed), cluster, num_clusters, seed
        )
        chat = ChatTemplate.of(TextTokenizer.from_json(tokenizer_json))
        with chat.renderer() as render:
            encoded = self.encode(chat, render, conversations, data.max_length, "train")
        if not data.packing:
            return encoded
        return PackedData(encoded, packed_rows(encoded.sequences.lengths(), data.max_length))

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> InstructionEvaluator:
        """Load the held-out conversations for a model that is already there."""
        chat = ChatTemplate.of(TextTokenizer.from_json(tokenizer_json))
        with chat.renderer() as render:
            return InstructionEvaluator(self, data, _held_out(data), chat, render)

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[Any]) -> list[str]:
        """Answer questions: each a text, or the messages of a conversation that ends with one."""
        return self.answers(parts, *self.prompts(tokenizer_json, inputs))

    def prompts(self, tokenizer_json: str, inputs: Sequence[Any]) -> tuple[TextTokenizer, list[list[int]]]:
        """Return the tokenizer, and the ids that the answers to questions follow: no model is needed for them."""
        chat = ChatTemplate.of(TextTokenizer.from_json(tokenizer_json))
        conversations = [question_of(value) for value in inputs]
        with chat.renderer() as render:
            return chat.tokenizer, [prompt_of(chat, render, messages, "predict") for messages in conversations]

    def answers(self, parts: ModelParts, tokenizer: TextTokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Answer what :meth:`prompts` gave."""
        return write_answers(parts, tokenizer, prompts, self.config, drawn=True)

    def example(self, data: DataConfig, tokenizer_json: str) -> str:
        """Return the first training conversation as the model sees it, with what counts between ⟦ and ⟧."""
        chat = ChatTemplate.of(TextTokenizer.from_json(tokenizer_json))
        conversations = load_conversations(data, "train", 0, 0 if "{cluster}" in data.train_source else None)
        with chat.renderer() as render:
            (kept,) = self._kept(chat, render, conversations.subset([0]), data.max_length)
        return kept.counted.marked()

    # Encoding.

    def encode(
        self,
        chat: ChatTemplate,
        render: Render,
        conversations: Conversations,
        longest: int,
        split: str,
        kept: list[list[Message]] | None = None,
    ) -> LabelledData:
        """Encode conversations, cut between turns where they are too long; ``kept`` gets what is left of each."""
        labels = array("i")
        num_cut = num_dropped = num_rewritten = num_open = 0

        def each_ids() -> Iterator[list[int]]:
            nonlocal num_cut, num_dropped, num_rewritten, num_open
            for counted, messages, dropped, unanswered in self._kept(chat, render, conversations, longest):
                num_dropped += dropped
                num_cut += dropped > 0
                num_open += unanswered > 0
                num_rewritten += counted.is_rewritten
                if kept is not None:
                    kept.append(messages)
                ids = counted.ids
                labels.extend(i if yes else IGNORED_LABEL for i, yes in zip(ids, counted.is_counted, strict=True))
                yield ids

        sequences = EncodedText.of(each_ids())
        if num_cut:
            logger.warning(
                "%d of %d conversations of the %s data are longer than data.max-length = %d: the last %d of their "
                "messages were left out",
                *(num_cut, len(conversations), split, longest, num_dropped),
            )
        if num_open:
            logger.warning(
                "%d of %d conversations of the %s data go on behind their last answer: what stands there was left out",
                *(num_open, len(conversations), split),
            )
        if num_rewritten:
            logger.warning(
                "the chat template changes earlier answers in %d of %d conversations of the %s data: their last answer "
                "counts alone",
                *(num_rewritten, len(conversations), split),
            )
        encoded_labels = EncodedText(np.frombuffer(labels, dtype=np.int32), sequences.starts, 0)
        return LabelledData(replace(sequences, truncated=num_cut), encoded_labels, chat.tokenizer.pad_id, True)

    def _kept(self, chat: ChatTemplate, render: Render, conversations: Conversations, longest: int) -> Iterator[_Kept]:
        """Yield each conversation's tokens and messages, whole turns that fit.

        Raises
        ------
        ValueError
            For conversations of which nothing is left to learn, with their places, or one that cannot be rendered.
        """
        too_long: list[tuple[str, int]] = []
        for row, messages in enumerate(conversations):
            place = conversations.place(row)
            _check_spelled(chat.tokenizer, messages, place)
            ends = [i for i, message in enumerate(messages, 1) if message["role"] == ASSISTANT]
            whole = len(messages) if self.config.loss_on == "all" else ends[-1]
            try:
                end = _cut(chat, render, messages, list(dict.fromkeys([*ends, whole])), longest)
                counted = chat.counted(render, messages[:end], self.config.loss_on)
            except RenderingFailed as error:
                raise ValueError(f"{place}: the chat template refuses the conversation: {error}") from error
            if len(counted.ids) > longest:
                too_long.append((place, len(counted.ids)))
            elif not any(counted.is_counted):
                raise ValueError(f"{place}: nothing of the conversation counts in the loss; remove the row")
            if not too_long:
                yield _Kept(counted, messages[:end], whole - end, len(messages) - whole)
        if too_long:
            raise ValueError(
                f"data.max-length: {too_long[0][0]}: the first answer ends after {too_long[0][1]} tokens, expected at "
                f"most {longest}: nothing is left to learn. {len(too_long)} of {len(conversations)} conversations are "
                f"so long; raise it to {max(length for _, length in too_long)}, or remove these rows"
            )

    @contextmanager
    def _loaded(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Iterator[_Loaded]:
        check_model(self.name, self.head, model, data.max_length)
        find_scorers(scorer_names(self.config.evaluate_generate))
        shares, sizes = training_shares(data, partial(load_conversations, data, "train", seed), num_clusters, seed)
        held_out = _held_out(data)
        known = shares or list(held_out.values())
        ready = ready_tokenizer(data, model, templates=True)
        tokenizer = ready or train_tokenizer(_contents(known), data.vocab_size, data.pretokenized)
        check_known(tokenizer, _contents(known), is_ready=ready is not None)
        tokenizer = tokenizer.with_settings(reads_special=data.special_tokens != "text")
        name = self.config.chat_template or ("chatml" if ready is None else "")
        chat = ChatTemplate.chosen(tokenizer, name, self.config.date)
        is_new = bool(self.config.chat_template) and model.trainable != "full"
        with chat.renderer() as render:
            chat = chat.checked(render, gets_marks=ready is None, needs_marks=is_new)
            for share in shares:
                for _ in self._kept(chat, render, share.subset(range(min(_CHECKED, len(share)))), data.max_length):
                    pass
            yield _Loaded(sizes, held_out, chat, render)


class InstructionEvaluator(LanguageModelEvaluator):
    """Loss and perplexity of the tokens that count; and scores of written answers, each conversation's last one."""

    def __init__(
        self,
        task: InstructionTask,
        data: DataConfig,
        held_out: dict[str, Conversations],
        chat: ChatTemplate,
        render: Render,
    ) -> None:
        self._tokenizer = chat.tokenizer
        self._scorers = find_scorers(scorer_names(task.config.evaluate_generate))
        self._asked: dict[str, list[_Asked]] = {}
        encoded = {}
        for split, conversations in held_out.items():
            kept: list[list[Message]] = []
            encoded[split] = task.encode(chat, render, conversations, data.max_length, split, kept)
            number = num_scored(task.config, split, len(kept)) if self._scorers else 0
            self._asked[split] = [_last_question(chat, render, messages) for messages in kept[:number]]
        super().__init__(task.config, encoded)

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Score ``split``: of validation the first ``evaluate-examples`` conversations, of test all."""
        score = super().evaluate(parts, split)
        asked = self._asked[split]
        if not asked:
            return score
        answers = write_answers(parts, self._tokenizer, [each.prompt for each in asked], self.config)
        scored = [
            (each.question, _without_thoughts(answer), _without_thoughts(each.reference))
            for each, answer in zip(asked, answers, strict=True)
        ]
        means = {name: sum(scorer(*each) for each in scored) / len(scored) for name, scorer in self._scorers.items()}
        return replace(
            score,
            metrics=score.metrics | means,
            signature=f"{score.signature}; {', '.join(means)} of {len(asked)} answers",
            sources=[each.question for each in asked],
            predictions=answers,
            references=[each.reference for each in asked],
        )

    def examples(self, parts: ModelParts) -> list[dict[str, str]]:
        """Answer the first questions of the test data, for the report."""
        asked = self._asked["test"][:_SHOWN]
        answers = write_answers(parts, self._tokenizer, [each.prompt for each in asked], self.config) if asked else []
        return [
            {"question": each.question, "reference": each.reference, "answer": answer}
            for each, answer in zip(asked, answers, strict=True)
        ]


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    question: str
    reference: str


def _last_question(chat: ChatTemplate, render: Render, messages: Sequence[Message]) -> _Asked:
    last = max(i for i, message in enumerate(messages) if message["role"] == ASSISTANT)
    questions = [message["content"] for message in messages[:last] if message["role"] == USER]
    return _Asked(chat.prompt(render, messages[:last]), questions[-1], messages[last]["content"])


def _without_thoughts(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def write_answers(
    parts: ModelParts,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    config: TaskConfig,
    drawn: bool = False,
) -> list[str]:
    """Write the answers to prompts, as :func:`flower_app.tasks.continued.continued` does, without the turn's end.

    Raises
    ------
    ValueError
        If a prompt does not fit the model, or the library does not know the model's family.
    """
    longest = max_length(parts.spec) or sys.maxsize
    for prompt in prompts:
        if len(prompt) >= longest:
            raise ValueError(
                f"a conversation of {len(prompt)} tokens leaves no room for an answer in the model's {longest} "
                f"positions: {tokenizer.decode([prompt])[0][:60]!r}...; shorten it"
            )
    turn_end = tokenizer.settings.turn_end or ""
    written = continued(parts, tokenizer, prompts, config, drawn)
    if written is None:
        raise ValueError(
            f"model.family: expected one of the transformers library, whose models write answers, found "
            f"{parts.spec.family!r}"
        )
    return [tokenizer.decode([ids])[0].removesuffix(turn_end).rstrip() for ids in written]


def _cut(chat: ChatTemplate, render: Render, messages: Sequence[Message], ends: Sequence[int], longest: int) -> int:
    """Return the last of ``ends`` before which the messages fit; where none does, the first."""

    def length(end: int) -> int:
        return chat.length(render, messages[:end])

    if len(ends) == 1 or length(ends[-1]) <= longest:
        return ends[-1]
    return ends[max(0, bisect_right(ends, longest, hi=len(ends) - 1, key=length) - 1)]


def prompt_of(chat: ChatTemplate, render: Render, messages: Sequence[Message], place: str) -> list[int]:
    """Return the ids that an answer follows.

    Raises
    ------
    ValueError
        If the template refuses the conversation, or a text spells a special token where strangers write.
    """
    _check_spelled(chat.tokenizer, messages, place)
    try:
        return chat.prompt(render, messages)
    except RenderingFailed as error:
        raise ValueError(f"{place}: the chat template refuses the conversation: {error}") from error


def _check_spelled(tokenizer: TextTokenizer, messages: Sequence[Message], place: str) -> None:
    """Refuse a message that spells out a special token, where text of strangers is read."""
    if tokenizer.settings.reads_special:
        return
    for number, message in enumerate(messages, 1):
        # A template may write a model's thoughts, too.
        ids, _ = tokenizer.encode_places("\n".join(message.values()))
        if token := next((tokenizer.token(i) for i in ids if i in tokenizer.special_ids), ""):
            raise ValueError(
                f"{place}, message {number}: the text spells the special token {token}, and data.special-tokens = "
                "text; remove it"
            )


def _held_out(data: DataConfig) -> dict[str, Conversations]:
    return {split: load_conversations(data, split, seed=0) for split in ("validation", "test")}


def _contents(shares: Sequence[Conversations]) -> Iterator[str]:
    return (message["content"] for share in shares for messages in share for message in messages)
