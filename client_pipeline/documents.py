"""JSON and TOML that a user or a stranger has written: one kind of error, no nesting and no number beyond reason."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 100
"""Tables and lists within each other."""
MOST_DIGITS = 300
"""Most digits of a whole number: a float holds it."""
_TOO_LONG = f"a whole number: expected at most {MOST_DIGITS} digits, found more"


def json_value(text: str | bytes) -> Any:
    """Read JSON.

    Raises
    ------
    ValueError
        If it is none, or beyond :data:`MOST_LEVELS` or :data:`MOST_DIGITS`.
    """
    return _bounded(json.loads, text)


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
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        # Python converts no number of thousands of digits, and names a setting of its own.
        raise ValueError(_TOO_LONG) from None
    level = [document]
    for _ in range(MOST_LEVELS + 1):
        if any(isinstance(value, int) and abs(value) >= 10**MOST_DIGITS for value in level):
            raise ValueError(_TOO_LONG)
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        if not inner:
            return document
        level = [value for values in inner for value in values]
    raise ValueError(f"tables and lists within each other: expected at most {MOST_LEVELS} levels, found more")
