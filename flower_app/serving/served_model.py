"""A model that answers, and the bounds within which it does."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from client_pipeline.serving.engine import Engine
from flower_app.serving.requests import CompletionRequest, RequestError
from flower_app.serving.writing import LENGTH, Left, Piece, Sampling, Writing, prompt_tokens
from flower_app.tasks.chat_template import ChatTemplate, RenderingFailed
from flower_app.tasks.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on what clients may ask for; those of tokens are sums over all texts of all requests."""

    most_tokens: int
    """Tokens of prompts and answers whose keys and values fit the devices."""
    longest: int
    """Tokens of a prompt with its answer: positions of the model."""
    most_requests: int = 16
    """Requests that are answered at the same time."""
    most_waiting: int = 32
    """Requests that wait for others to end."""
    body_bytes: int = 1 << 20
    request_s: float = 600.0
    """Longest time of a request, the wait for others included [s]."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how its texts are chosen."""

    ids: list[int]
    sampling: Sampling
    echo: bool = False
    """Whether the prompt's own tokens are told, too."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows, and tokens of each, whose keys and values are kept at most."""
        return self.sampling.n, len(self.ids) + self.sampling.max_tokens


class _Room:
    """Room for keys and values on the devices. Requests are let in in the order in which they come.

    Rows that are computed together are as long as the longest of them, so the rows of all requests times the longest
    is what counts.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._inside: list[tuple[int, int]] = []
        self._changed = asyncio.Condition()
        self._waiting: list[tuple[int, int]] = []

    async def enter(self, size: tuple[int, int]) -> None:
        """Wait for room.

        Raises
        ------
        RequestError
            If too many wait already, or the room never suffices.
        """
        if size[0] * size[1] > self._bounds.most_tokens:
            raise RequestError(
                400,
                f"max_tokens: {size[0]} texts of up to {size[1]} tokens with their prompt were asked for, and the "
                f"devices have room for the keys and values of {self._bounds.most_tokens} tokens; ask for fewer or "
                "shorter texts",
                "max_tokens",
                "context_length_exceeded",
            )
        if len(self._waiting) >= self._bounds.most_waiting:
            raise RequestError(429, "too many requests wait already; try again later", None, "rate_limit_exceeded")
        self._waiting.append(size)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting[0] is size and self._fits(size))
                self._inside.append(size)
        finally:
            self._waiting = [other for other in self._waiting if other is not size]
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, size: tuple[int, int]) -> bool:
        inside = [*self._inside, size]
        tokens = sum(rows for rows, _ in inside) * max(length for _, length in inside)
        return len(inside) <= self._bounds.most_requests and tokens <= self._bounds.most_tokens

    async def leave(self, size: tuple[int, int]) -> None:
        """Give room back."""
        async with self._changed:
            self._inside.remove(size)
            self._changed.notify_all()


class ServedModel:
    """A model with its tokenizer, for the door.

    Parameters
    ----------
    name : that clients ask for
    engine : runs its steps
    config : the library's configuration of the model
    tokenizer : of the model
    chat : its template; None: it has none, so it continues texts alone
    bounds : on requests
    """

    legacy_tokens: int | None = 16
    """Longest text of ``/v1/completions`` where none is named, as OpenAI has it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        config: Any,
        tokenizer: TextTokenizer,
        chat: ChatTemplate | None,
        bounds: Bounds,
    ) -> None:
        self.name, self.tokenizer, self.bounds = name, tokenizer, bounds
        self.created = int(time.time())
        self._engine, self._config, self._chat = engine, config, chat
        self._threads = ThreadPoolExecutor(bounds.most_requests, thread_name_prefix="request")
        self._room = _Room(bounds)
        self._rendering = threading.Lock()
        self._break_offs: set[Callable[[str], None]] = set()
        """End an answer in progress, each with a reason."""

    # Prompts.

    def check(self, asked: CompletionRequest) -> None:
        """Refuse what the model does not do of what a client may ask for."""

    def text_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is continued."""
        return self.tokenizer.begun(self.tokenizer.encode([text])[0])

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return ids that the model has; refuse others."""
        if any(i >= self._config.vocab_size for i in ids):
            raise RequestError(400, f"prompt: expected ids below {self._config.vocab_size}, found {max(ids)}", "prompt")
        return list(ids)

    async def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids that the next message of a conversation follows.

        Raises
        ------
        RequestError
            If the model has no template, or its template refuses the conversation.
        """
        if self._chat is None:
            raise RequestError(400, f"{self.name} has no chat template; use /v1/completions", "messages")
        return await asyncio.to_thread(self._rendered, messages)

    def _rendered(self, messages: list[dict[str, str]]) -> list[int]:
        from flower_app.tasks.instruction import prompt_of

        assert self._chat is not None
        try:
            # A program at a time: its bounds of memory and time are those of one conversation.
            with self._rendering, self._chat.renderer() as render:
                return prompt_of(self._chat, render, messages, "messages")
        except (RenderingFailed, ValueError) as error:
            raise RequestError(400, str(error), "messages") from error

    def sampling(self, ids: Sequence[int], most_tokens: int | None, sampling: Sampling) -> Sampling:
        """Complete a choice of tokens by the room that the prompt leaves.

        Raises
        ------
        RequestError
            If there is none.
        """
        room = self.bounds.longest - len(ids)
        if room < (most_tokens if most_tokens is not None else 1):
            raise RequestError(
                400,
                f"the prompt has {len(ids)} tokens, and with max_tokens = {most_tokens} that is more than the model's "
                f"{self.bounds.longest} positions; shorten it",
                None,
                "context_length_exceeded",
            )
        affordable = self.bounds.most_tokens // sampling.n - len(ids)
        return replace(sampling, max_tokens=most_tokens if most_tokens is not None else min(room, max(affordable, 1)))

    # Answers.

    async def answer(self, prompts: Sequence[Prompt]) -> AsyncIterator[tuple[int, Piece]]:
        """Yield pieces of the texts of all prompts, each with its prompt's number, until all texts are done.

        Raises
        ------
        RequestError
            If the devices cannot answer, or there is no room.
        """
        # One prompt after the other.
        size = (max(prompt.size[0] for prompt in prompts), max(prompt.size[1] for prompt in prompts))
        await self._room.enter(size)
        loop, pieces, left = asyncio.get_running_loop(), asyncio.Queue[Any](), Left()

        def tell(number: int, piece: Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

        def work() -> None:
            try:
                for number, prompt in enumerate(prompts):
                    self._write(prompt, partial(tell, number), left)
                end: Any = None
            except Exception as error:  # noqa: BLE001 (whatever it is, the client is told, and the door goes on)
                end = error
            loop.call_soon_threadsafe(pieces.put_nowait, end)

        def break_off(reason: str) -> None:
            # The loop may have ended with the server.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, RuntimeError(reason))

        try:
            running = loop.run_in_executor(self._threads, work)
        except RuntimeError as error:
            await self._room.leave(size)
            raise RequestError(503, "the door is closed") from error
        self._break_offs.add(break_off)
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise RequestError(503, f"the devices could not answer: {_first_line(piece)}") from piece
                yield piece
        finally:
            self._break_offs.discard(break_off)
            left.leave()
            # Its place is free when it has left, also where the client has gone.
            task = loop.create_task(self._leave(running, size))
            _ENDING.add(task)
            task.add_done_callback(_ENDING.discard)

    async def _leave(self, running: asyncio.Future[None], size: tuple[int, int]) -> None:
        await asyncio.wait([running])
        await self._room.leave(size)

    def _write(self, prompt: Prompt, tell: Callable[[Piece], None], left: Left) -> None:
        ids, sampling = prompt.ids, prompt.sampling
        if prompt.echo:
            told, _ = prompt_tokens(self._engine, ids, sampling.logprobs)
            for row in range(sampling.n):
                text, finish = self.tokenizer.text_of(ids), "" if sampling.max_tokens else LENGTH
                tell(Piece(row, text, tuple(told), finish, len(ids)))
        if not sampling.max_tokens:
            if not prompt.echo:
                for row in range(sampling.n):
                    tell(Piece(row, "", (), LENGTH))
            return
        Writing(self.tokenizer, ids, sampling, tell, left).write(self._engine, self._config)

    def close(self, reason: str = "the door is closed") -> None:
        """End all requests with a reason, at once, also where the devices are gone that they wait for."""
        for break_off in list(self._break_offs):
            break_off(reason)
        self._engine.close(reason)
        self._threads.shutdown(wait=False)


_ENDING: set[asyncio.Task[None]] = set()
"""Tasks that nobody else refers to."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def draw_seed(seed: int | None) -> int:
    """Return the request's seed, or one at random."""
    return secrets.randbits(63) if seed is None else seed % 2**63
