"""``collapipe watch``."""

# Alone: the commands of a kind have a file of their own.

from __future__ import annotations

from typing import Annotated

import typer

from flower_app.cli.options import Run
from flower_app.console import say


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def watch(
        run: Run = "latest",
        port: Annotated[int, typer.Option(help="On 127.0.0.1; 0: any that is free.")] = 8090,
        token: Annotated[str, typer.Option(envvar="COLLAPIPE_WATCH_TOKEN", help="Empty: a new one.")] = "",
    ) -> None:
        """Show a run that goes on, or has ended, in the browser; /metrics is for Prometheus."""
        import secrets

        from flower_app.runs.run_directory import find_run
        from flower_app.watch.server import serve_watch

        if token and len(token) < 16:
            raise ValueError(
                f"--token: expected at least 16 characters, found {len(token)}; leave it out for a new one"
            )
        serve_watch(find_run(run), port, token or secrets.token_urlsafe(24), say)
