"""``collapipe init`` and ``collapipe runs``: what comes before a run, and what is there after some."""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flower_app.cli.options import Json
from flower_app.console import print_json, say


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(init)
    app.command()(runs)


def init(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...",
            help="Your text: a table, a CoNLL or text file, two parallel files, a folder, or a hub id.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The configuration to write.")] = Path("collapipe.toml"),
    task: Annotated[str, typer.Option(help="Instead of a guess.")] = "",
    text_column: Annotated[str, typer.Option(help="Column of the texts, instead of a guess.")] = "",
    label_column: Annotated[str, typer.Option(help="Column of labels, tags or translations.")] = "",
    pair_column: Annotated[str, typer.Option(help="Column of second texts, where texts come in pairs.")] = "",
    validation: Annotated[list[str] | None, typer.Option(help="File to score on; two where the text has two.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="File for the final score.")] = None,
    scenario: Annotated[str, typer.Option(help="The network that the model must fit on.")] = "two-clusters",
    pretrained: Annotated[str, typer.Option(help="Folder of a model of transformers to start from.")] = "",
    as_json: Json = False,
) -> None:
    """Write a configuration for your own text, with what was guessed and why."""
    options = {name: value for name, value in locals().items() if name != "as_json"}
    from flower_app.first_config.first_config import FirstConfigRequest, make_first_config

    split_files = {"validation": validation or (), "test": test or ()}
    written = make_first_config(FirstConfigRequest(**options | split_files), say)
    say(f"wrote {written.file}; next: collapipe run --config {out}")
    if as_json:
        print_json({"file": str(written.file), "notes": written.notes, "guess": asdict(written.guess)})


def runs(
    runs_dir: Annotated[Path, typer.Option(help="Folder of the run directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs of a folder, the newest first: status, rounds, metric and the round it is of, size."""
    from flower_app.plain_console import PlainConsole
    from flower_app.runs.listing import UNREADABLE, listed_runs, runs_table

    found = listed_runs(runs_dir)
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
    else:
        PlainConsole(width=160).print(runs_table(found))
        for run in found:
            if run.reason:
                say(f"{run.name}: {UNREADABLE}: {run.reason}")
