"""One request's texts, token by token: what a client hears of a call of the library's ``generate``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from client_pipeline.serving.engine import Engine
from client_pipeline.serving.generation import AnsweringModel, GumbelNoise, RemoteKeys
from flower_app.tasks.tokenizer import TextTokenizer

STOP, LENGTH = "stop", "length"
_CONTEXT = 8
"""Tokens before a text that decide how its first one is written: some tokenizers drop a blank at the beginning."""
_HALF = "�"
"""How a decoder writes a part of a character."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of tokens."""

    max_tokens: int
    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    """Texts behind the same prompt."""
    logprobs: int = -1
    """Likeliest tokens that are told beside each token with their log-probabilities; -1: nothing is told."""

    def processors(self) -> list[LogitsProcessor]:
        """Return what becomes of the scores; the largest is taken then."""
        if self.temperature == 0:
            return []
        chosen: list[LogitsProcessor] = []
        if self.temperature != 1:
            chosen.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        return [*chosen, GumbelNoise(self.seed)]


@dataclass(frozen=True)
class Chosen:
    """A token, and how likely the model holds it before temperature and the like."""

    token_id: int
    logprob: float | None
    """None: nothing comes before it."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class Piece:
    """What is new of a text."""

    row: int
    text: str
    chosen: tuple[Chosen, ...] = ()
    finish: str = ""
    """:data:`STOP` or :data:`LENGTH` with the last piece."""
    num_tokens: int = 0
    """Tokens of the piece, of the last one with that of the text's end."""


@dataclass
class _Row:
    """A text that is being written."""

    context: list[int]
    ids: list[int] = field(default_factory=list)
    decoded: str = ""
    """Text of all tokens that end with a whole character."""
    told: int = 0
    told_tokens: int = 0
    waiting: list[Chosen] = field(default_factory=list)
    finish: str = ""
    at: int = 0
    """Tokens whose text is in ``decoded``."""


class Writing(StoppingCriteria):  # type: ignore[misc]
    """Texts behind one prompt, while ``generate`` writes them.

    Parameters
    ----------
    tokenizer : of the model
    prompt : ids
    sampling : with the number of texts
    tell : gets each piece; called in the thread that writes
    is_left : whether nobody listens any more
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        tell: Callable[[Piece], None],
        is_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tokenizer, self._prompt, self._sampling = tokenizer, list(prompt), sampling
        self._tell, self._is_left = tell, is_left
        self._rows = [_Row(self._prompt[-_CONTEXT:]) for _ in range(sampling.n)]
        self._scores_RV = torch.empty(0)

    def write(self, engine: Engine, config: Any) -> None:
        """Write all texts; pieces are told on the way."""
        sampling = self._sampling
        model = AnsweringModel(config, self._saw)
        ids_RT = torch.tensor([self._prompt] * sampling.n)
        options = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=list(self._tokenizer.end_ids),
            pad_token_id=self._tokenizer.pad_id,
            bos_token_id=self._tokenizer.bos_id,
        )
        with torch.no_grad():
            model.write(
                engine,
                ids_RT,
                torch.ones_like(ids_RT),
                generation_config=options,
                logits_processor=sampling.processors(),
                stopping_criteria=[self],
            )

    def _saw(self, scores_RV: Tensor) -> None:
        self._scores_RV = scores_RV

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Take the new token of each text; returns which are done."""
        if self._is_left():
            return torch.ones(len(input_ids), dtype=torch.bool)
        tokens = input_ids[:, -1].tolist()
        told = chosen_tokens(self._scores_RV, tokens, self._sampling.logprobs)
        for number, (row, token, chosen) in enumerate(zip(self._rows, tokens, told, strict=True)):
            if not row.finish:
                self._take(number, row, token, chosen)
        return torch.tensor([bool(row.finish) for row in self._rows])

    def _take(self, number: int, row: _Row, token: int, chosen: Chosen) -> None:
        row.ids.append(token)
        row.waiting.append(chosen)
        if token in self._tokenizer.end_ids:
            row.finish = STOP
        else:
            self._decode(row)
            if len(row.ids) >= self._sampling.max_tokens:
                row.finish = LENGTH
        end = len(row.decoded)
        stops = [
            at for stop in self._sampling.stop if (at := row.decoded.find(stop, max(0, row.told - len(stop)))) >= 0
        ]
        if stops:
            end, row.finish = min(stops), STOP
        elif not row.finish:
            # What may be the beginning of a stop text is told later.
            end -= max((_overlap(row.decoded[row.told :], stop) for stop in self._sampling.stop), default=0)
        if end > row.told or row.finish:
            num_tokens = len(row.ids) - row.told_tokens
            piece = Piece(number, row.decoded[row.told : end], tuple(row.waiting), row.finish, num_tokens)
            row.told, row.waiting, row.told_tokens = max(end, row.told), [], len(row.ids)
            self._tell(piece)

    def _decode(self, row: _Row) -> None:
        """Add the text of new tokens, unless they end within a character."""
        before = [*row.context, *row.ids[: row.at]][-_CONTEXT:]
        new = row.ids[row.at :]
        start = self._tokenizer.text_of(before)
        text = self._tokenizer.text_of([*before, *new])
        if not text.endswith(_HALF) or len(row.ids) >= self._sampling.max_tokens:
            row.decoded += text[len(start) :]
            row.at = len(row.ids)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which a stop text begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def chosen_tokens(scores_TV: Tensor, tokens: Sequence[int], number: int) -> list[Chosen]:
    """Return each token with its log-probability under its row of scores, and the ``number`` likeliest ones.

    With a negative number none is computed.
    """
    if number < 0:
        return [Chosen(token, None, ()) for token in tokens]
    logprobs_TV = torch.log_softmax(scores_TV.double(), dim=-1)
    values, ids = logprobs_TV.topk(number, dim=-1)
    of_tokens = logprobs_TV.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    return [
        Chosen(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, row_ids, row_values in zip(tokens, of_tokens, ids.tolist(), values.tolist(), strict=True)
    ]


def prompt_tokens(engine: Engine, prompt: Sequence[int], number: int) -> tuple[list[Chosen], Tensor]:
    """Return a prompt's tokens with their log-probabilities, and the scores [1, V] of what comes next."""
    ids_RT, keys = torch.tensor([list(prompt)]), RemoteKeys(engine)
    try:
        scores_TV = keys.step(ids_RT, torch.ones_like(ids_RT), last=len(prompt))[0]
    finally:
        keys.close()
    # Nothing comes before the first.
    return [Chosen(prompt[0], None, ()), *chosen_tokens(scores_TV[:-1], prompt[1:], number)], scores_TV[-1:]


class Left:
    """Whether a client has left."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def leave(self) -> None:
        """Note that nobody listens any more."""
        self._event.set()

    def __call__(self) -> bool:
        """Return whether a client has left."""
        return self._event.is_set()
