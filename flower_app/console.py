"""What commands say: words for people to standard error, ``--json`` alone to standard output."""

from __future__ import annotations

import json
from typing import Any

import typer


def say(text: str) -> None:
    """Tell a person."""
    typer.echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """Print the one object that ``--json`` promises."""
    typer.echo(json.dumps(value, ensure_ascii=False))
