"""A console for tables and progress that shows text as it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from flower_app.console import drop


class PlainConsole(Console):
    """Console without markup in names and messages; a closed reader does not end the program."""

    def __init__(self, **options: Any) -> None:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        super().__init__(**(plain | options))
        self.quiet = bool(options.get("quiet"))

    def on_broken_pipe(self) -> None:
        """Say no more, in place of ending the program."""
        self.quiet = True
        drop(self.file)
