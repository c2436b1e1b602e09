"""What a client may ask for: the requests of OpenAI's API, checked; what is not done is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_TEXTS = 16
"""Texts of one request."""
MOST_STOPS = 16
_TokenId = Annotated[int, Field(ge=0)]


class RequestError(Exception):
    """A request that is refused.

    Parameters
    ----------
    status : of HTTP
    message : with the remedy
    param : key of the request; None: the whole
    code : machine-readable reason
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def document(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class _Generation(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="forbid")
    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Not used: nothing is kept of who asks."""
    # Where they change nothing they are taken; what they would change is not done.
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, values: Any) -> Any:
        """Take ``null`` for a key that was left out, as OpenAI does."""
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @model_validator(mode="after")
    def _check_stops(self) -> Self:
        if "" in self.stops:
            raise ValueError("stop: expected texts with at least one character")
        return self


class CompletionRequest(_Generation):
    """A request of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
        | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: expected n, or no such key: all texts are returned")
        if self.n * len(self.prompts) > MOST_TEXTS:
            raise ValueError(f"n: expected at most {MOST_TEXTS} texts in all, found {self.n * len(self.prompts)}")
        return self


class ContentPart(BaseModel):
    """A part of a message; texts alone are read."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return role and text as chat templates take them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ChatRequest(_Generation):
    """A request of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: _TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    """Not used, as ``user``."""

    @property
    def most_tokens(self) -> int | None:
        """Longest answer that is asked for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_Asked = TypeVar("_Asked", bound=_Generation)


def parsed(kind: type[_Asked], body: bytes) -> _Asked:
    """Read a request's body.

    Raises
    ------
    RequestError
        With the first key that does not fit.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function", "str")))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "this server does not know the parameter, or does not do what it asks for; leave it out"
        raise RequestError(400, f"{key}: {message}" if key else message, key or None) from None
