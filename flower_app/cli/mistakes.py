"""Mistakes of users as one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from flower_app.cli.options import ExitCode
from flower_app.console import say
from flower_app.error_text import full_disk_text, mistake_text


@contextmanager
def mistakes_as_lines() -> Iterator[None]:
    """Turn the errors of a command into a line and an exit code; an unexpected error keeps its traceback."""
    try:
        _check_text()
        yield
    except (ValueError, OSError) as error:
        if full := full_disk_text(error):
            say(f"error: {full}")
            raise typer.Exit(ExitCode.FAILED) from error
        if not (mistake := mistake_text(error)):
            raise
        if os.environ.get("COLLAPIPE_TRACEBACK") == "1":
            say(traceback.format_exc())
        say(f"error: {mistake}")
        raise typer.Exit(ExitCode.BAD_INPUT) from error
    except RuntimeError as error:
        # pathlib raises a plain RuntimeError for this.
        if "home directory" in str(error):
            say("error: HOME: no home directory is known of this user; set HOME to a folder of your own")
            raise typer.Exit(ExitCode.BAD_INPUT) from error
        # Compared by name: their modules would slow down every command.
        if type(error).__name__ == "RunFailed":
            say(f"error: {error}")
            raise typer.Exit(ExitCode.FAILED) from error
        if type(error).__name__ != "InfeasibleRound":
            raise
        say(f"infeasible: {error}")
        raise typer.Exit(ExitCode.INFEASIBLE) from error
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _check_text() -> None:
    """Refuse arguments, and a folder to work in, that no configuration can hold: they are bytes that are no UTF-8."""
    for text in (*sys.argv[1:], os.getcwd()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{os.fsencode(text)!r}: expected UTF-8, found other bytes; rename it") from None
