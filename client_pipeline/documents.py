"""JSON and TOML of a user or a stranger: one kind of error, no key twice, no nesting and no number beyond reason."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

MOST_LEVELS = 100
"""Tables and lists within each other."""
MOST_DIGITS = 300
"""Most digits of a whole number: a float holds it."""
_LONG = f"a whole number: expected at most {MOST_DIGITS} digits, found more"


def json_value(text: str | bytes) -> Any:
    """Read JSON.

    Raises
    ------
    ValueError
        If it is none, has a key twice, or is beyond :data:`MOST_LEVELS` or :data:`MOST_DIGITS`.
    """
    return _bounded(partial(json.loads, object_pairs_hook=without_repeats), text)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; of a key that comes twice one reader would take the first value, another the last.

    Raises
    ------
    ValueError
        Naming such a key.
    """
    items = dict(pairs)
    if len(items) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"keys of an object: expected each once, found {twice[:60]!r} twice; remove one")
    return items


def toml_table(text: str) -> dict[str, Any]:
    """Read TOML.

    Raises
    ------
    ValueError
        As :func:`json_value`.
    """
    table: dict[str, Any] = _bounded(tomllib.loads, text)
    return table


def _bounded(read: Callable[[Any], Any], text: Any) -> Any:
    try:
        document = read(text)
    except RecursionError:
        raise ValueError(f"tables and lists within each other: expected at most {MOST_LEVELS} levels") from None
    except ValueError as error:
        # Python's own words advise to change Python.
        if "int_max_str_digits" not in str(error):
            raise
        raise ValueError(_LONG) from None
    level = [document]
    for _ in range(MOST_LEVELS + 1):
        if any(isinstance(value, int) and abs(value) >= 10**MOST_DIGITS for value in level):
            raise ValueError(_LONG)
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        if not inner:
            return document
        level = [value for values in inner for value in values]
    raise ValueError(f"tables and lists within each other: expected at most {MOST_LEVELS} levels, found more")
