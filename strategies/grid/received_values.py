"""Typed values of JSON that came from a client: a schema is a table of kinds, and what does not fit is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from strategies.printable import printable

_EXCERPT = 80


class MalformedReply(ValueError):
    """A client's answer is not what its order asks for; the message says what was expected and found."""


class Kind(NamedTuple):
    """Condition on a value."""

    words: str
    """Description for error messages."""
    fits: Callable[[Any], bool]

    def check(self, value: Any, location: str) -> None:
        """Raise MalformedReply for a value of another kind."""
        if not self.fits(value):
            raise MalformedReply(f"{location}: expected {self.words}, found {excerpt(value)}")


def whole(least: int = 0, most: int = 2**62) -> Kind:
    """A whole number; the limits belong to it."""
    words = f"a whole number of at least {least}" if most == 2**62 else f"a whole number from {least} to {most}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -1e30, most: float = 1e30) -> Kind:
    """A finite number; the limits belong to it."""
    words = f"a finite number from {least:g} to {most:g}"
    return Kind(words, lambda value: type(value) in (int, float) and least <= value <= most and math.isfinite(value))


def exactly(expected: Any) -> Kind:
    """One value alone."""
    return Kind(repr(expected), lambda value: type(value) is type(expected) and value == expected)


def one_of(*words: str) -> Kind:
    """One of some words."""
    return Kind(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def or_none(kind: Kind) -> Kind:
    """The same, or nothing."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
SECONDS = number(0.0, 1e9)
SIZE = whole()

Schema = Mapping[str, "Kind | Schema"]


def check_object(value: Any, schema: Schema, location: str, optional: frozenset[str] = frozenset()) -> None:
    """Raise MalformedReply unless a value is an object with just these keys, each of its kind.

    Parameters
    ----------
    value : as ``json`` read it
    schema : kinds by key; objects within it have schemas of their own
    location : names the value in messages
    optional : keys that may be absent
    """
    if not isinstance(value, dict):
        raise MalformedReply(f"{location}: expected an object, found {excerpt(value)}")
    if missing := [key for key in schema if key not in value and key not in optional]:
        raise MalformedReply(f"{location}: {missing[0]} is missing")
    if unknown := [key for key in value if key not in schema]:
        raise MalformedReply(f"{location}: unknown key {excerpt(unknown[0])}")
    for key, kind in schema.items():
        if key not in value:
            continue
        if isinstance(kind, Kind):
            kind.check(value[key], f"{location}.{key}")
        else:
            check_object(value[key], kind, f"{location}.{key}")


def parse_json(text: Any, location: str, most_bytes: int) -> Any:
    """Parse JSON of bounded length; NaN and Infinity are none.

    Raises
    ------
    MalformedReply
        If it is no text, too long, or no JSON.
    """
    if not isinstance(text, str):
        raise MalformedReply(f"{location}: expected text, found {excerpt(text)}")
    if len(text) > most_bytes:
        raise MalformedReply(f"{location}: expected at most {most_bytes} characters, found {len(text)}")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedReply(f"{location}: expected JSON, {excerpt(error)}") from error


def excerpt(value: Any) -> str:
    """A value from outside in a few printable characters, for messages."""
    if isinstance(value, list | dict) and not _is_plain(value):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    if isinstance(value, str | bytes):
        value = value[:_EXCERPT]
    elif type(value) is int and abs(value) > 10**30:
        return "a number beyond 10^30"
    text = printable(str(value) if isinstance(value, Exception) else repr(value))
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 3]}..."


def _is_plain(value: Any) -> bool:
    """Return whether a container is a short list of small numbers."""
    return isinstance(value, list) and len(value) <= 8 and all(type(v) is int and abs(v) <= 10**18 for v in value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
