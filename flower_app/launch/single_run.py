"""A run in simulation from the command line: its directory, its processes, and what it leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from client_pipeline.counted import counted
from client_pipeline.runtime.ray.ray_folder import short_folder
from flower_app.config.cautions import cautions
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.serve_config import NEVER
from flower_app.config.sources import Sets, given_keys, load_config, read_sets, refuse_unknown_classes
from flower_app.gguf_import import with_gguf_imported
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder, Outcome
from flower_app.launch.machine_limits import check_limits, limits_hint
from flower_app.launch.progress import RunProgress
from flower_app.launch.ray_folders import end_abandoned_runs
from flower_app.launch.run_events import resume_line
from flower_app.launch.simulation import SimulationLauncher
from flower_app.report.pictures import write_pictures
from flower_app.report.round_parts import local_steps_hint
from flower_app.runs.doors import door_line
from flower_app.runs.run_directory import (
    FINISHED,
    claim_run_directory,
    create_run_directory,
    find_run,
    read_run_config,
    read_summary,
    write_config,
)
from flower_app.runs.run_lock import locked, refuse_foreign_files
from flower_app.training.network import clients_at_once, training_scenario


class NewRun(NamedTuple):
    """A run that is checked and ready to be launched."""

    run_dir: Path
    config: RunConfig
    """Complete: with the run directory and the number of clusters."""


def new_run(
    config: str | None, sets: Sets = (), say: Callable[[str], None] = lambda text: None, *, simulated: bool = True
) -> NewRun:
    """Read and check a configuration, and make its run directory.

    Parameters
    ----------
    config : a TOML file, or the name of a packaged one; None: the default run
    sets : ``KEY=VALUE`` overrides, or keys with values
    say : receives cautions about the configuration, and the name of a GGUF file that is imported
    simulated : whether the run is a simulation on this machine

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is started.
    """
    if simulated:
        prepare_machine()
    resolved = load_config(config, sets)
    if simulated and resolved.serve.when != NEVER:
        raise ValueError(
            f"serve.when: expected {NEVER} in a simulation, which has no boxes, found {resolved.serve.when!r}; "
            "collapipe serve RUN answers on this machine"
        )
    for caution in cautions(resolved, given_keys(config, sets)):
        say(f"warning: {caution}")
    resolved = with_gguf_imported(resolved, say)
    check_new_run(resolved)
    return claim(resolved)


def prepare_machine() -> None:
    """Clean up after runs that were killed, and refuse a machine on which no simulation can start."""
    check_limits()
    end_abandoned_runs(short_folder())


def claim(resolved: RunConfig) -> NewRun:
    """Make the run directory of a checked configuration; fill in what the configuration leaves open."""
    if resolved.run_dir:
        run_dir = claim_run_directory(resolved.run_dir)
        refuse_foreign_files(run_dir)
    else:
        run_dir = create_run_directory(resolved.runs_dir, resolved.name)
    num_clusters = resolved.num_clusters or training_scenario(resolved).num_clusters
    task = resolved.task
    if task.name == "instruction":
        # A run that goes on another day writes the same one.
        task = replace(task, date=task.date or date.today().isoformat())
    complete = replace(resolved, run_dir=str(run_dir), num_clusters=num_clusters, decoder_sync=resolved.sync, task=task)
    return NewRun(run_dir, complete)


def check_new_run(resolved: RunConfig) -> None:
    """Check the configuration of a run that begins."""
    from flower_app.launch.preflight import check_run

    if resolved.resume:
        raise ValueError("resume: use collapipe run --resume RUN")
    check_run(resolved)


def continued_run(run: str, sets: Sets = (), allowed: Iterable[str] = ()) -> NewRun:
    """Find a run that stopped, and check that it can go on.

    Parameters
    ----------
    run : its directory, its name in ``runs``, or ``latest``
    sets : ``num-rounds`` alone: more than the run has had, also where it has finished
    allowed : modules and packages whose classes the run may name

    Raises
    ------
    ValueError, FileNotFoundError
        If it has finished all of its rounds, or has no checkpoint.
    """
    from flower_app.config.strategy_choice import check_can_resume
    from flower_app.launch.preflight import check_run
    from flower_app.runs import run_checkpoints

    run_dir = find_run(run)
    refuse_foreign_files(run_dir)
    summary, past = read_summary(run_dir), read_run_config(run_dir)
    refuse_unknown_classes(past.to_flat(), allowed)
    past.check_strategy()
    config = replace(past, run_dir=str(run_dir), resume=True, num_rounds=_extended(past, read_sets(sets)))
    if summary is not None and summary.get("status") == FINISHED and config.num_rounds == past.num_rounds:
        raise ValueError(
            f"--resume: {run_dir} has finished its {counted(int(summary.get('rounds', 0)), 'round')}; nothing is left "
            f"to do: extend it with --set num-rounds={2 * past.num_rounds}"
        )
    check_can_resume(config)
    # Files that look left over may belong to a run that still continues.
    with locked(run_dir):
        run_checkpoints.newest(run_dir, config)
    check_run(config)
    return NewRun(run_dir, config)


def _extended(past: RunConfig, sets: Mapping[str, Any]) -> int:
    """Return the rounds of a run that goes on; refuse fewer than it had."""
    if others := sorted(sets.keys() - {"num-rounds"}):
        raise ValueError(
            f"--resume: a run goes on as it began, found --set {others[0]}; only num-rounds may grow: leave it out, "
            "or start a new run"
        )
    rounds = sets.get("num-rounds", past.num_rounds)
    if not isinstance(rounds, int) or rounds < past.num_rounds:
        raise ValueError(f"--resume: num-rounds: expected at least the run's {past.num_rounds}, found {rounds!r}")
    return rounds


def superlink_of(launcher: Launcher | None) -> str:
    """Return the address of the SuperLink that a run was handed to; empty for a simulation."""
    return str(getattr(launcher, "address", ""))


def launch_run(
    run: NewRun,
    say: Callable[[str], None],
    launcher: Launcher | None = None,
    progress: RunProgress | None = None,
) -> Outcome:
    """Run to the end, whatever it is, and write the report."""
    run_dir, config = run
    if launcher is None and config.resume:
        # A new run prepares the machine before it has a directory.
        prepare_machine()
    progress = progress or RunProgress(run_dir, config.num_rounds)
    reports: list[Path | None] = []

    def draw() -> None:
        # Do not draw an interrupted report again.
        reports.append(None)
        reports.append(write_pictures(run_dir))

    outcome = _launch(run, say, launcher, progress, draw)
    if outcome.status != FINISHED:
        lines = [f"error: {outcome.error}", limits_hint(outcome.error), f"logs: {run_dir / 'logs'}"]
        say("\n".join([*filter(None, lines), resume_line(run_dir, superlink_of(launcher))]))
    else:
        progress.report(outcome.summary)
        best, scored = (outcome.summary.get(key) for key in ("best_round", "scored_round"))
        if best and scored and best != scored:
            say(
                f"best {config.selection.metric} on the validation data: round {best}, and the model is that of round "
                f"{scored}; selection.load-best-at-end = true keeps the best one"
            )
        # In a simulation the time of messages depends on this machine's load; on real machines it is part of the round.
        if superlink_of(launcher) and (hint := local_steps_hint(progress.rounds, config.local_steps)):
            say(hint)
        for door in outcome.summary.get("doors", ()):
            say(door_line(door))
    if not reports:
        draw()
    if report := reports[-1]:
        say(f"report: {report}")
    return outcome


def _launch(
    run: NewRun,
    say: Callable[[str], None],
    launcher: Launcher | None,
    progress: RunProgress,
    finished: Callable[[], None],
) -> Outcome:
    """Launch a run and follow it; ``finished`` may be called before its programs have ended."""
    run_dir, config = run
    with locked(run_dir):
        # A resumed run may have more rounds than at its start.
        write_config(run_dir, config)
        # An earlier failure may have left files of the run's programs, and a summary.
        shutil.rmtree(run_dir / "flower", ignore_errors=True)
        if config.resume:
            (run_dir / "summary.json").unlink(missing_ok=True)
        app = assemble_app(run_dir / "flower" / "app")
        config_file = run_dir / "flower" / "run.toml"
        config_file.write_text(tomli_w.dumps(nested(config.to_flat())), encoding="utf-8")
        say(f"run: {run_dir}")
        order = LaunchOrder(
            run_dir=run_dir,
            app=app,
            run_config=config_file,
            num_clusters=config.num_clusters,
            clients_at_once=clients_at_once(config),
            watch=progress.update,
            finished=finished,
            say=say,
        )
        try:
            with progress:
                outcome = (launcher or SimulationLauncher()).launch(order)
        except KeyboardInterrupt:
            say(f"interrupted; {resume_line(run_dir, superlink_of(launcher))}")
            raise
        progress.update()
    return outcome
