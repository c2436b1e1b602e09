"""Options that several commands have, and the exit codes of all."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import typer


class ExitCode(IntEnum):
    """What a command that did not end well tells its caller."""

    BAD_INPUT = 2
    INFEASIBLE = 3
    INTERRUPTED = 130


Config = Annotated[str | None, typer.Option("--config", help="A TOML file, or the name of a packaged one.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output and nothing else.")]
Run = Annotated[str, typer.Argument(help="A run directory, a name in runs, or latest.")]
