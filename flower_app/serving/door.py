"""The door: OpenAI's API over HTTP, for who has the key, and a page on which a person can try the model.

Prompts and answers are written to no log.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from importlib import resources
from ipaddress import ip_address
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flower_app.serving.door_key import key_digest
from flower_app.serving.requests import ChatRequest, CompletionRequest, RequestError, parsed
from flower_app.serving.served_model import Prompt, ServedModel, draw_seed
from flower_app.serving.writing import Chosen, Piece, Sampling

_BODY_S = 30.0
"""Longest time for a request's body to come [s]."""
_GONE = object()
"""Stands for a result that nobody waits for any more."""
_PAGE = {
    "": ("index.html", "text/html"),
    "chat.js": ("chat.js", "text/javascript"),
    "chat.css": ("chat.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ANY_ADDRESS = "*"
"""Among the names of a door: any address, but no other name."""


def door_app(served: ServedModel, digest: bytes, hosts: Sequence[str], reader: str) -> FastAPI:
    """Make the application.

    Parameters
    ----------
    served : the model
    digest : of the key, see :func:`key_digest`
    hosts : names and addresses under which the door may be asked for; see :data:`ANY_ADDRESS`
    reader : where answers can be read on their way, for the page; empty: nowhere but here
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, digest=digest, hosts=tuple(hosts), request_s=served.bounds.request_s)

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(error.document(), error.status)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
        refusal = RequestError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
        return JSONResponse(refusal.document(), error.status_code)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_name(served, name)
        return _card(served)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parsed(CompletionRequest, await _body(request, served.bounds.body_bytes))
        _check_name(served, asked.model)
        served.check(asked)
        prompts = []
        for prompt in asked.prompts:
            ids = served.text_prompt(prompt) if isinstance(prompt, str) else served.check_ids(prompt)
            sampling = _sampling(asked, -1 if asked.logprobs is None else asked.logprobs)
            most = served.legacy_tokens if asked.max_tokens is None else asked.max_tokens
            prompts.append(Prompt(ids, served.sampling(ids, most, sampling), asked.echo))
        return await _respond(served, request, asked, prompts, _Completions(served, asked.logprobs is not None))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parsed(ChatRequest, await _body(request, served.bounds.body_bytes))
        _check_name(served, asked.model)
        ids = await served.chat_prompt([message.plain() for message in asked.messages])
        sampling = _sampling(asked, asked.top_logprobs if asked.logprobs else -1)
        prompt = Prompt(ids, served.sampling(ids, asked.most_tokens, sampling))
        return await _respond(served, request, asked, [prompt], _Chat(served, asked.logprobs))

    @app.get("/privacy")
    async def privacy() -> dict[str, str]:
        return {"model": served.name, "reader": reader}

    @app.get("/")
    @app.get("/chat.js")
    @app.get("/chat.css")
    async def page(request: Request) -> Response:
        file, media_type = _PAGE[request.url.path.removeprefix("/")]
        text = (resources.files("flower_app.serving") / "page" / file).read_text(encoding="utf-8")
        return Response(text, media_type=media_type)

    return app


class _Guard:
    """Refuse who has no key, a page of elsewhere, or a name that is not this door's; bound the time of a request."""

    def __init__(self, app: ASGIApp, digest: bytes, hosts: tuple[str, ...], request_s: float) -> None:
        self._app, self._digest, self._hosts, self._request_s = app, digest, hosts, request_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        if (refusal := self._refusal(scope)) is not None:
            await JSONResponse(refusal.document(), refusal.status)(scope, receive, send_with_headers)
            return
        try:
            # Also a client that stops reading is waited for no longer.
            async with asyncio.timeout(self._request_s):
                await self._app(scope, receive, send_with_headers)
        except TimeoutError:
            return

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        name = _without_port(host)
        if name not in self._hosts and not (ANY_ADDRESS in self._hosts and _is_address(name)):
            return RequestError(403, f"the door is not known as {host[:80]!r}; ask for it by its address")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return RequestError(403, "a page of elsewhere may not ask this door")
        if not scope["path"].startswith("/v1/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key_digest(key.strip()), self._digest):
            return RequestError(
                401,
                "expected the door's key (Authorization: Bearer KEY), found another or none",
                None,
                "invalid_api_key",
            )
        return None


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()


async def _body(request: Request, most: int) -> bytes:
    """Read a request's body within bounds."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise RequestError(413, f"the body has over {most} bytes; ask for less at a time")
    except TimeoutError:
        raise RequestError(408, f"the body did not come within {_BODY_S:g} s") from None
    return bytes(body)


def _card(served: ServedModel) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "collapipe"}


def _check_name(served: ServedModel, name: str) -> None:
    if name != served.name:
        raise RequestError(404, f"no model {name[:80]!r} here; there is {served.name!r}", "model", "model_not_found")


def _sampling(asked: Any, logprobs: int) -> Sampling:
    return Sampling(
        max_tokens=0,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=draw_seed(asked.seed),
        stop=asked.stops,
        n=asked.n,
        logprobs=logprobs,
    )


class _Form:
    """How answers look in one of the two kinds of requests."""

    prefix = whole = chunk = ""

    def __init__(self, served: ServedModel, with_logprobs: bool) -> None:
        self._served, self._with_logprobs = served, with_logprobs
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """Return what a stream begins with; None: nothing."""
        return None

    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        """Return a piece of a stream."""
        raise NotImplementedError

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return a whole text."""
        raise NotImplementedError

    def token(self, token_id: int) -> str:
        """Return a token as text."""
        return self._served.tokenizer.shown(token_id)


class _Completions(_Form):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.chosen, offset),
            "finish_reason": piece.finish or None,
        }

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        whole = _joined(pieces)
        return self.delta(index, whole, 0)

    def _logprobs(self, chosen: Sequence[Chosen], offset: int) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        offsets, tokens = [], [self.token(each.token_id) for each in chosen]
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in chosen],
            "top_logprobs": [
                None if each.logprob is None else {self.token(i): value for i, value in reversed(each.top)}
                for each in chosen
            ],
            "text_offset": offsets,
        }


class _Chat(_Form):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        del offset
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.chosen),
            "finish_reason": piece.finish or None,
        }

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        whole = _joined(pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._logprobs(whole.chosen),
            "finish_reason": whole.finish,
        }

    def _logprobs(self, chosen: Sequence[Chosen]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(each.token_id, each.logprob),
                    "top_logprobs": [self._token(i, value) for i, value in each.top],
                }
                for each in chosen
                if each.token_id not in self._served.tokenizer.end_ids
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    return Piece(0, text, tuple(chosen for piece in pieces for chosen in piece.chosen), pieces[-1].finish)


async def _respond(
    served: ServedModel, request: Request, asked: Any, prompts: Sequence[Prompt], form: _Form
) -> Response:
    """Answer as a whole, or piece by piece."""
    answer = served.answer(prompts)
    if asked.stream:
        # Whatever refuses the request does so before the first byte.
        first = await _unless_left(request, anext(answer, None))
        if first is _GONE:
            return Response(status_code=499)
        wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(_events(first, answer, prompts, form, wants_usage), media_type="text/event-stream")
    pieces: dict[int, list[Piece]] = {}
    if await _unless_left(request, _collected(answer, prompts, pieces)) is _GONE:
        return Response(status_code=499)
    choices = [form.choice(index, pieces[index]) for index in sorted(pieces)]
    usage = _usage(prompts, sum(_num_written(prompts, index, part) for index, part in pieces.items()))
    return JSONResponse({**form.head, "object": form.whole, "choices": choices, "usage": usage})


async def _collected(
    answer: AsyncIterator[tuple[int, Piece]], prompts: Sequence[Prompt], pieces: dict[int, list[Piece]]
) -> None:
    async for number, piece in answer:
        pieces.setdefault(_index(prompts, number, piece), []).append(piece)


async def _unless_left(request: Request, awaited: Awaitable[Any]) -> Any:
    """Wait for a result; :data:`_GONE` if the client hangs up before it is there, and nothing goes on then."""
    working, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else _GONE
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Wait until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _index(prompts: Sequence[Prompt], number: int, piece: Piece) -> int:
    return sum(prompt.sampling.n for prompt in prompts[:number]) + piece.row


def _num_written(prompts: Sequence[Prompt], index: int, pieces: Sequence[Piece]) -> int:
    prompt = next(p for n, p in enumerate(prompts) if index < sum(q.sampling.n for q in prompts[: n + 1]))
    told = sum(piece.num_tokens for piece in pieces)
    return told - (len(prompt.ids) if prompt.echo else 0)


def _usage(prompts: Sequence[Prompt], written: int) -> dict[str, int]:
    asked = sum(len(prompt.ids) for prompt in prompts)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


async def _events(
    first: tuple[int, Piece] | None,
    answer: AsyncIterator[tuple[int, Piece]],
    prompts: Sequence[Prompt],
    form: _Form,
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Yield the lines of a stream."""
    begun: dict[int, int] = {}
    written = 0

    def event(choices: list[Any], **more: Any) -> str:
        return f"data: {json.dumps({**form.head, 'object': form.chunk, 'choices': choices, **more})}\n\n"

    async def all_pieces() -> AsyncIterator[tuple[int, Piece]]:
        if first is not None:
            yield first
            async for each in answer:
                yield each

    try:
        async for number, piece in all_pieces():
            index = _index(prompts, number, piece)
            if index not in begun and (opening := form.first(index)) is not None:
                yield event([opening])
            yield event([form.delta(index, piece, begun.get(index, 0))])
            begun[index] = begun.get(index, 0) + len(piece.text)
            written += piece.num_tokens
        if wants_usage:
            echoed = sum(len(prompt.ids) * prompt.sampling.n for prompt in prompts if prompt.echo)
            yield event([], usage=_usage(prompts, written - echoed))
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.document())}\n\n"
    finally:
        await answer.aclose()  # type: ignore[attr-defined]
