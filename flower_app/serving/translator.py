"""A model that translates, behind the door: its encoder is the engine's, its decoder in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch

from client_pipeline.families.registry import family_named
from client_pipeline.partition.parts import ModelParts
from client_pipeline.serving.encoding import encoded
from client_pipeline.serving.engine import Engine
from flower_app.serving.requests import CompletionRequest, RequestError
from flower_app.serving.served_model import Bounds, Prompt, ServedModel
from flower_app.serving.writing import LENGTH, STOP, Left, Piece, Sampling
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.translation import longest_translation, search

_ONLY = {"temperature": 0, "top_p": 1, "top_k": 0, "n": 1, "echo": False, "logprobs": None}
"""What a request may say beside its text, if it says anything: one text is searched for, and none is drawn."""


class Translator(ServedModel):
    """A prompt is a source text, and its answer what ``collapipe predict`` writes.

    Parameters
    ----------
    name : that clients ask for
    engine : runs the encoder's steps
    parts : of the model, in evaluation
    tokenizer : of the model
    bounds : on requests
    task : its search
    """

    legacy_tokens = None

    def __init__(
        self, name: str, engine: Engine, parts: ModelParts, tokenizer: TextTokenizer, bounds: Bounds, task: TaskConfig
    ) -> None:
        vocabulary = SimpleNamespace(vocab_size=family_named(parts.spec.family).num_classes(parts.spec))
        super().__init__(name, engine, vocabulary, tokenizer, chat=None, bounds=bounds)
        self._parts, self._task = parts, task
        self._searching = threading.Lock()
        """One search at a time: what the decoder keeps of its beams is that of one text."""

    def check(self, asked: CompletionRequest) -> None:
        """Refuse what asks for another text than the search finds."""
        for key in _ONLY.keys() & asked.model_fields_set:
            if (found := getattr(asked, key)) != _ONLY[key]:
                raise RequestError(
                    400,
                    f"{key}: expected {_ONLY[key]}, found {found}: {self.name} translates by the search of its run "
                    "(task.decode); leave it out",
                    key,
                )

    def text_prompt(self, text: str) -> list[int]:
        """Return the ids of a source text."""
        begin, end = self.tokenizer.marks
        return [*begin, *self.tokenizer.encode([text.strip()])[0], *end]

    async def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Refuse a conversation."""
        raise RequestError(
            400,
            f"{self.name} translates, and holds no conversation; send the source text to /v1/completions",
            "messages",
        )

    def sampling(self, ids: Sequence[int], most_tokens: int | None, sampling: Sampling) -> Sampling:
        """Complete a request by the longest translation.

        Raises
        ------
        RequestError
            If the source has more tokens than the model takes.
        """
        if len(ids) > self.bounds.longest:
            raise RequestError(
                400,
                f"the source has {len(ids)} tokens, expected at most {self.bounds.longest}; split it",
                "prompt",
                "context_length_exceeded",
            )
        limit = longest_translation(self._task, self._parts, len(ids))
        return replace(sampling, max_tokens=min(limit if most_tokens is None else most_tokens, self.bounds.longest))

    def _write(self, prompt: Prompt, tell: Callable[[Piece], None], left: Left) -> None:
        limit, ids = prompt.sampling.max_tokens, prompt.ids
        if not limit:
            tell(Piece(0, "", (), LENGTH))
            return
        memory_BTD = encoded(self._engine, ids)
        with self._searching, torch.no_grad():
            if left():
                return
            task, mask_BT = replace(self._task, max_new_tokens=limit), torch.ones(1, len(ids), dtype=torch.bool)
            (written,) = search(task, self._parts, memory_BTD, mask_BT, self.tokenizer.end_ids)
        (text,) = self.tokenizer.decode([written])
        num_tokens = len(self.tokenizer.marks[0]) + len(written)
        ends = [at for stop in prompt.sampling.stop if (at := text.find(stop)) >= 0]
        is_cut = num_tokens >= limit and not ends
        text = text[: min(ends, default=len(text))]
        tell(Piece(0, text, (), LENGTH if is_cut else STOP, min(num_tokens + 1, limit)))
