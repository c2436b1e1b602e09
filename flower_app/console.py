"""Output of commands: words for people to standard error, ``--json`` alone to standard output.

A closed reader, such as ``head``, ends no run: further output is dropped.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

import typer


def say(text: str) -> None:
    """Tell a person."""
    _echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """Print the one object that ``--json`` promises."""
    _echo(json.dumps(value, ensure_ascii=False), err=False)


def _echo(text: str, *, err: bool) -> None:
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        drop(sys.stderr if err else sys.stdout)


def drop(stream: IO[str]) -> None:
    """Lead a stream into nothing, also for what it still holds."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
