"""Options that several commands have, and the exit codes of all."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import typer


class ExitCode(IntEnum):
    """Exit codes of commands that did not end well."""

    FAILED = 1
    BAD_INPUT = 2
    INFEASIBLE = 3
    INTERRUPTED = 130


Config = Annotated[str | None, typer.Option("--config", help="A TOML file, or the name of a packaged one.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output and nothing else.")]
AllowedModules = Annotated[
    list[str] | None,
    typer.Option("--allow-module", help="Module or package whose classes a run may name; repeatable."),
]
Run = Annotated[str, typer.Argument(help="A run directory, a name in runs, or latest.")]
