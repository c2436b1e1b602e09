"""``collapipe reproduce``: run an experiment, draw it, and put the paper's figures beside ours.

``python -m experiments.reproduce`` takes the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from experiments import (
    computation,
    drift,
    fig4,
    fig5,
    fig6,
    fig11,
    gamma,
    grid,
    participation,
    queue_region,
    table3,
    theorem1,
    tuned_baselines,
)
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row
from experiments.base.results import (
    COMPACT,
    PICTURE,
    ROWS,
    markdown,
    read_rows,
    write_findings,
    write_rows,
    write_table,
)
from experiments.base.style import write_picture
from experiments.curves import load_curves
from experiments.tuned_learning import fig6_tuned
from flower_app.cli.mistakes import mistakes_as_lines
from flower_app.cli.options import Json, Sets
from flower_app.console import print_json, say

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        fig4.EXPERIMENT,
        fig5.EXPERIMENT,
        fig6.EXPERIMENT,
        fig6_tuned.EXPERIMENT,
        grid.FIG9,
        grid.FIG10,
        computation.FIG7,
        computation.FIG8,
        fig11.EXPERIMENT,
        table3.EXPERIMENT,
        theorem1.EXPERIMENT,
        gamma.EXPERIMENT,
        participation.EXPERIMENT,
        drift.EXPERIMENT,
        queue_region.EXPERIMENT,
        tuned_baselines.EXPERIMENT,
    )
}
ALL = "all"
"""Instead of a name: every experiment that only plans."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of ``collapipe reproduce``."""

    out: Path
    """Folder that gets one folder for each experiment."""
    smoke: bool = False
    """Small enough for a quick check."""
    plot_only: bool = False
    """Draw what is there; nothing is run."""
    curves: Path | None = None
    """Folder of curves instead of the packaged ``configs/paper``."""
    sets: Sequence[str] = ()
    """Pairs ``key=value`` over every curve's run configuration."""
    only: str = ""
    """Curves whose name contains this; the rows of the others stay as they are."""


def reproduce(name: str, options: ReproduceOptions, report: Callable[[str], None]) -> dict[str, list[PaperFinding]]:
    """Run the experiments of a name; each leaves rows, picture and findings in a folder of its own.

    Parameters
    ----------
    name : of one, or ``all``
    options : how
    report : receives a line for each step

    Returns
    -------
    By experiment, the paper's figures beside ours.

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name or a curve that is wrong, before anything runs; or for rows that are not there.
    """
    experiments = _named(name)
    curves = {}
    if not options.plot_only:
        curves = {
            e.name: load_curves(
                e.name, smoke=options.smoke, folder=options.curves, sets=options.sets, only=options.only
            )
            for e in experiments
        }
    findings_by_name = {}
    for experiment in experiments:
        folder = options.out / experiment.name
        if options.plot_only:
            rows = read_rows(folder)
        else:
            report(f"{experiment.name}: {experiment.shows}")
            kept = _rows_of_other_curves(folder, curves[experiment.name]) if options.only else []
            rows = write_rows(chain(kept, experiment.run(curves[experiment.name], folder, report)), folder)
        write_picture(experiment.draw(rows), folder / PICTURE)
        if experiment.compact is not None:
            write_table(experiment.compact(rows), folder / COMPACT)
        findings_by_name[experiment.name] = experiment.findings(rows)
        write_findings(findings_by_name[experiment.name], folder)
        report(f"{experiment.name}: {folder / PICTURE}")
    return findings_by_name


def _rows_of_other_curves(folder: Path, curves: Sequence[Curve]) -> list[Row]:
    """Rows of an earlier call that are of other curves."""
    if not (folder / ROWS).is_file():
        return []
    now = {curve.name for curve in curves}
    return [row for row in read_rows(folder) if row["curve"] not in now]


def _named(name: str) -> list[Experiment]:
    if name == ALL:
        return [experiment for experiment in EXPERIMENTS.values() if not experiment.trains]
    if name not in EXPERIMENTS:
        raise ValueError(f"reproduce: expected {ALL} or one of {', '.join(EXPERIMENTS)}, found {name!r}")
    return [EXPERIMENTS[name]]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str,
        typer.Argument(
            help="fig4 to fig11, fig6-tuned, table3, theorem1, gamma, participation, drift, queues or tuned; "
            "all: those that only plan."
        ),
    ],
    smoke: Annotated[bool, typer.Option("--smoke", help="Small enough for a quick check.")] = False,
    out: Annotated[Path, typer.Option(help="Gets a folder of rows, picture and findings for each.")] = Path("results"),
    plot: Annotated[bool, typer.Option("--plot", help="Draw what is in --out; run nothing.")] = False,
    curves: Annotated[Path | None, typer.Option(help="Folder of curves instead of the packaged configs/paper.")] = None,
    only: Annotated[str, typer.Option(help="Curves whose name contains this; results of the others stay.")] = "",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Repeat a figure of the paper, with the published numbers beside ours."""
    with mistakes_as_lines():
        options = ReproduceOptions(out=out, smoke=smoke, plot_only=plot, curves=curves, sets=sets or (), only=only)
        findings_by_name = reproduce(name, options, say)
        if as_json:
            print_json({key: [vars(finding) for finding in findings] for key, findings in findings_by_name.items()})
            return
        for key, findings in findings_by_name.items():
            typer.echo(f"\n{key}\n\n{markdown(findings)}")


if __name__ == "__main__":
    app()
