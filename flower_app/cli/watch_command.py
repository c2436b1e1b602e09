"""``collapipe watch``."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flower_app.cli.options import Run
from flower_app.console import say

if TYPE_CHECKING:
    from flower_app.config.run_config import RunConfig


_TOKEN = "COLLAPIPE_WATCH_TOKEN"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def watch(
        run: Run = "latest",
        port: Annotated[int, typer.Option(help="On 127.0.0.1; 0: any that is free.")] = 8090,
        token: Annotated[str, typer.Option(envvar=_TOKEN, help="Empty: a new one.")] = "",
    ) -> None:
        """Show a run that goes on, or has ended, in the browser; /metrics is for Prometheus."""
        from flower_app.runs.run_directory import find_run
        from flower_app.watch.server import serve_watch

        serve_watch(find_run(run), port, _checked(token, "--token"), say)


class RunPage(NamedTuple):
    """The page beside a run of this process, before the run is there."""

    listener: socket.socket
    token: str

    def of(self, run_dir: Path, config: RunConfig) -> AbstractContextManager[None]:
        """Serve the page of a run."""
        from flower_app.runs.run_directory import CONFIG, write_config
        from flower_app.watch.server import watched

        if not (run_dir / CONFIG).is_file():
            # The launch of a new run writes the same file a moment later.
            write_config(run_dir, config)
        return watched(run_dir, self.listener, self.token, say)


@contextmanager
def run_page(port: int) -> Iterator[RunPage]:
    """Take the port before a run's directory is made; the token is new, or that of the environment."""
    from flower_app.watch.server import open_port

    token = _checked(os.environ.get(_TOKEN, ""), _TOKEN)
    with open_port(port, "--watch-port") as listener:
        yield RunPage(listener, token)


def _checked(token: str, name: str) -> str:
    if token and len(token) < 16:
        raise ValueError(f"{name}: expected at least 16 characters, found {len(token)}; leave it out for a new one")
    return token or secrets.token_urlsafe(24)
