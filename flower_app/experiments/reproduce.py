"""``collapipe reproduce``: run an experiment, draw it, and put the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from flower_app.experiments import (
    computation,
    drift,
    fig4,
    fig5,
    fig6,
    fig11,
    gamma,
    grid,
    queue_region,
    robustness,
    table3,
    theorem1,
    tuned_baselines,
)
from flower_app.experiments.curves import load_curves
from flower_app.experiments.experiment import Curve, Experiment, PaperFinding, Row
from flower_app.experiments.results import COMPACT, PICTURE, ROWS, read_rows, write_findings, write_rows, write_table
from flower_app.experiments.tuned_learning import fig6_tuned

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
        robustness.EXPERIMENT,
        drift.EXPERIMENT,
        queue_region.EXPERIMENT,
        tuned_baselines.EXPERIMENT,
    )
}
ALL = "all"
"""Instead of a name: every experiment that only plans."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """How to run the experiments."""

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


def reproduce(name: str, options: ReproduceOptions, say: Callable[[str], None]) -> dict[str, list[PaperFinding]]:
    """Run the experiments of a name; each leaves rows, picture and findings in a folder of its own.

    Parameters
    ----------
    name : of one, or ``all``
    options : how
    say : told of progress

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
            say(f"{experiment.name}: {experiment.shows}")
            kept = _rows_of_other_curves(folder, curves[experiment.name]) if options.only else []
            rows = write_rows(chain(kept, experiment.run(curves[experiment.name], folder, say)), folder)
        from flower_app.experiments.style import write_picture

        write_picture(experiment.draw(rows), folder / PICTURE)
        if experiment.compact is not None:
            write_table(experiment.compact(rows), folder / COMPACT)
        findings_by_name[experiment.name] = experiment.findings(rows)
        write_findings(findings_by_name[experiment.name], folder)
        say(f"{experiment.name}: {folder / PICTURE}")
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
