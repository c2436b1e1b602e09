"""A run in simulation from the command line: its directory, its processes, and what it leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from flower_app.config.run_config import RunConfig, nested
from flower_app.config.sources import load_config
from flower_app.config.strategy_choice import check_can_resume
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder, Outcome
from flower_app.launch.preflight import check_run, clusters_at_once
from flower_app.launch.progress import RunProgress
from flower_app.launch.simulation import SimulationLauncher
from flower_app.report.pictures import write_pictures
from flower_app.runs import run_checkpoints
from flower_app.runs.run_directory import (
    FINISHED,
    claim_run_directory,
    create_run_directory,
    find_run,
    read_run_config,
    read_summary,
    write_config,
)
from flower_app.runs.run_lock import locked, remove_abandoned_nodes


def new_run(config: str | None, sets: Sequence[str] = ()) -> tuple[Path, RunConfig]:
    """Check a configuration and make its run directory.

    Parameters
    ----------
    config : a TOML file, or the name of a packaged one; None: the default run
    sets : ``KEY=VALUE`` overrides

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is started.
    """
    return claim(load_config(config, sets))


def claim(resolved: RunConfig) -> tuple[Path, RunConfig]:
    """Check a configuration and make its run directory; see :func:`new_run`."""
    num_clusters = check_new_run(resolved)
    if resolved.run_dir:
        run_dir = claim_run_directory(resolved.run_dir)
    else:
        run_dir = create_run_directory(resolved.runs_dir, resolved.name)
    # All clusters run at once here, so the decoder may wait for all of them in every step.
    sync = "step" if resolved.decoder_sync == "auto" else resolved.decoder_sync
    return run_dir, replace(resolved, run_dir=str(run_dir), num_clusters=num_clusters, decoder_sync=sync)


def check_new_run(resolved: RunConfig) -> int:
    """Check a configuration; see :func:`new_run`. Returns its number of clusters."""
    if resolved.resume:
        raise ValueError("resume: use collapipe run --resume RUN")
    return check_run(resolved)


def continued_run(run: str) -> tuple[Path, RunConfig]:
    """Find a run that stopped, and check that it can go on.

    Raises
    ------
    ValueError, FileNotFoundError
        If it has finished, or has no checkpoint.
    """
    run_dir = find_run(run)
    summary = read_summary(run_dir)
    if summary is not None and summary.get("status") == FINISHED:
        raise ValueError(f"--resume: {run_dir} has finished its {summary.get('rounds')} rounds; nothing is left to do")
    config = replace(read_run_config(run_dir), run_dir=str(run_dir), resume=True)
    check_can_resume(config)
    # What looks left over belongs to a run that still goes on.
    with locked(run_dir):
        run_checkpoints.newest(run_dir, config)
    check_run(config)
    return run_dir, config


def launch_run(
    run_dir: Path, config: RunConfig, say: Callable[[str], None], launcher: Launcher | None = None
) -> Outcome:
    """Run to the end, whatever it is, and write the report.

    Parameters
    ----------
    run_dir : the run's directory
    config : complete: run directory and number of clusters included
    say : told what went wrong
    launcher : what the app is handed to; None: a simulation on this machine
    """
    with locked(run_dir) as lock:
        if not config.resume:
            write_config(run_dir, config)
        # One that failed before may have left its own.
        shutil.rmtree(run_dir / "flower", ignore_errors=True)
        folder = assemble_app(run_dir / "flower" / "app")
        config_file = run_dir / "flower" / "run.toml"
        config_file.write_text(tomli_w.dumps(nested(config.to_flat())), encoding="utf-8")
        if config.resume:
            # Whatever the last process wrote about its end is no longer true.
            (run_dir / "summary.json").unlink(missing_ok=True)
        with RunProgress(run_dir, config.num_rounds) as progress:
            order = LaunchOrder(
                run_dir=run_dir,
                app=folder,
                run_config=config_file,
                num_clusters=config.num_clusters,
                clusters_at_once=clusters_at_once(config),
                watch=progress.update,
                say=say,
                inherited_fds=[lock],
            )
            try:
                outcome = (launcher or SimulationLauncher()).launch(order)
            finally:
                # A server app that was killed could not.
                remove_abandoned_nodes()
            progress.update()
    if outcome.status != FINISHED:
        say(f"error: {outcome.error}\nlogs: {run_dir / 'logs'}")
    else:
        progress.report(outcome.summary)
    # The run's own processes leave this to us.
    if report := write_pictures(run_dir):
        say(f"report: {report}")
    return outcome
