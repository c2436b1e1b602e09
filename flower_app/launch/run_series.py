"""Many trainings one after the other in one simulation: SuperLink, Ray and client apps start once for all.

Their start takes longer than a small training. Each run still has a run directory of its own, with control units,
devices and a decoder service of its own. A run that has finished before is taken as it is, one that stopped goes on
from its last checkpoint, and one without a checkpoint begins again: a series may be interrupted, or made in parts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import tomli_w

from client_pipeline.counted import counted
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.sources import named_modules
from flower_app.config.strategy_choice import FREE_TO_CHANGE, check_can_resume
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder
from flower_app.launch.session_app import RUNS
from flower_app.launch.simulation import SimulationLauncher
from flower_app.launch.single_run import check_new_run, claim, continued_run, prepare_machine
from flower_app.runs.run_directory import CONFIG, FINISHED, read_run_config, read_summary, write_config
from flower_app.runs.run_lock import locked
from flower_app.training.network import clients_at_once

SERVER, CLIENT = "flower_app.launch.session_app:server", "flower_app.launch.session_app:client"
_FILLED_IN = ("num-clusters", "decoder-sync", "name")
_MADE_FIRST = {"plans", "logs", ".lock"}
"""Entries of a run directory before its configuration is written."""


class RunFailed(RuntimeError):
    """Failure of a run of a series; the message names the run, the reason and its logs."""


class SeriesRun(NamedTuple):
    """One run of a series."""

    label: str
    """Name of its configuration; runs of one label differ in nothing but seeds and places."""
    config: RunConfig
    """With a ``run-dir`` of its own."""


def train_series(
    runs: Sequence[SeriesRun], folder: Path, say: Callable[[str], None], launcher: Launcher | None = None
) -> None:
    """Train what has not finished before, each run in its ``run-dir``, in their order, in simulations that they share.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained: for a configuration that cannot run, naming its label; or for a run directory that
        holds a run with another configuration.
    RunFailed
        If a run fails; those before it are finished, those after it not begun.
    """
    unfinished = [run for run in runs if not has_finished(run.config)]
    say(f"{counted(len(runs), 'run')}, {len(runs) - len(unfinished)} finished before")
    # Check all runs before the first one starts: a misspelt name is found at once. Seeds cannot make a key wrong.
    first_of_label: dict[str, RunConfig] = {}
    for run in unfinished:
        first_of_label.setdefault(run.label, run.config)
    for label, config in first_of_label.items():
        try:
            prepare_machine()
            check_new_run(config)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{label}: {error}") from error
    claimed_runs = [go_on(run.config, say) for run in unfinished]
    for run_dir, config in claimed_runs:
        if config.resume:
            # The summary of the earlier attempt is no longer true.
            (run_dir / "summary.json").unlink(missing_ok=True)
        else:
            write_config(run_dir, config)
    # A node for each cluster: runs with as many clusters share a simulation.
    for count in dict.fromkeys(config.num_clusters for _, config in claimed_runs):
        session = [entry for entry in claimed_runs if entry[1].num_clusters == count]
        _train_session(session, folder, say, launcher or SimulationLauncher())


def _train_session(
    claimed_runs: Sequence[tuple[Path, RunConfig]], folder: Path, say: Callable[[str], None], launcher: Launcher
) -> None:
    """Train runs with equally many clusters in one simulation."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        # An interrupted session leaves its files.
        shutil.rmtree(folder / "flower", ignore_errors=True)
        (folder / "summary.json").unlink(missing_ok=True)
        entries = [{"run-dir": str(run_dir), "resume": config.resume} for run_dir, config in claimed_runs]
        (folder / RUNS).write_text(json.dumps(entries), encoding="utf-8")
        config_file = folder / "flower" / "session.toml"
        app = assemble_app(folder / "flower" / "app", server=SERVER, client=CLIENT)
        first = claimed_runs[0][1].to_flat() | {"run-dir": str(folder), "name": "session"}
        config_file.write_text(tomli_w.dumps(nested(first)), encoding="utf-8")
        waiting_runs = [run_dir for run_dir, _ in claimed_runs]

        def watch() -> None:
            while waiting_runs and (summary := read_summary(waiting_runs[0])) is not None:
                run_dir = waiting_runs.pop(0)
                wall_s = summary.get("wall_s", 0)
                say(f"{run_dir.name}: {summary.get('status')} in {wall_s:.0f} s, {len(waiting_runs)} left")

        order = LaunchOrder(
            run_dir=folder,
            app=app,
            run_config=config_file,
            num_clusters=claimed_runs[0][1].num_clusters,
            clients_at_once=max(clients_at_once(config) for _, config in claimed_runs),
            watch=watch,
        )
        outcome = launcher.launch(order)
        watch()
    if outcome.status != FINISHED:
        raise RunFailed(f"{outcome.error}; logs: {folder / 'logs'}. The same command continues the unfinished runs")
    shutil.rmtree(folder, ignore_errors=True)


def has_finished(config: RunConfig) -> bool:
    """Return whether this run has finished in its ``run-dir``; one that stopped has not.

    Raises
    ------
    ValueError
        If the folder holds a run with another configuration, or something else.
    """
    run_dir = Path(config.run_dir)
    if not (run_dir / CONFIG).is_file():
        if run_dir.exists() and (not run_dir.is_dir() or {path.name for path in run_dir.iterdir()} - _MADE_FIRST):
            raise ValueError(f"{run_dir}: is not a run directory; move it away or choose another --out")
        return False
    past, wanted = read_run_config(run_dir).to_flat(), config.to_flat()
    for key in sorted(wanted):
        if past[key] != wanted[key] and not key.startswith((*FREE_TO_CHANGE, *_FILLED_IN)):
            raise ValueError(
                f"{run_dir}: was trained with {key} = {past[key]!r}, expected {wanted[key]!r}; remove the folder "
                "or choose another --out"
            )
    summary = read_summary(run_dir)
    return summary is not None and summary.get("status") == FINISHED


def go_on(config: RunConfig, say: Callable[[str], None]) -> tuple[Path, RunConfig]:
    """Prepare a run that has not finished: from its checkpoint, or from the beginning.

    Returns
    -------
    Its directory, and its complete configuration.
    """
    run_dir = Path(config.run_dir)
    if (run_dir / CONFIG).is_file():
        try:
            check_can_resume(config)
        except ValueError:
            pass
        else:
            with suppress(FileNotFoundError):
                continued = continued_run(str(run_dir), allowed=named_modules(config.to_flat()))
                say(f"{run_dir.name}: goes on from its checkpoint")
                return continued
        with locked(run_dir):
            say(f"{run_dir.name}: did not finish, and has no checkpoint; begins again")
            shutil.rmtree(run_dir)
    return claim(config)
