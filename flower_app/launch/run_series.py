"""Many trainings one after the other in one simulation: SuperLink, Ray and client processes start once for all.

Starting them takes longer than a small training. Each run still has a run directory of its own, with control units,
devices and a decoder service of its own. A run that has finished before is taken as it is, and one that stopped goes
on: so a series may be interrupted, or made in parts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w

from flower_app.config.run_config import RunConfig, nested
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder
from flower_app.launch.past_runs import go_on, has_finished
from flower_app.launch.session_app import RUNS
from flower_app.launch.simulation import SimulationLauncher
from flower_app.launch.single_run import check_new_run
from flower_app.runs.run_directory import FINISHED, read_summary, write_config
from flower_app.runs.run_lock import locked
from flower_app.training.simulated_actors import clusters_at_once, shared_actors, worker_imports

SERVER, CLIENT = "flower_app.launch.session_app:server", "flower_app.launch.session_app:client"


class SeriesRun(NamedTuple):
    """One run of a series."""

    label: str
    """What its configuration is called; runs of one label differ in nothing but seeds and places."""
    config: RunConfig
    """With a ``run-dir`` of its own."""


def train_series(
    runs: Sequence[SeriesRun], folder: Path, say: Callable[[str], None], launcher: Launcher | None = None
) -> None:
    """Train what has not finished before, each run in its ``run-dir``, in their order, in simulations that they share.

    Parameters
    ----------
    runs : all runs of the series
    folder : for the simulation itself, removed when it has finished
    say : told what runs
    launcher : what the session's app is handed to; None: a simulation on this machine

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained: for a configuration that cannot run, naming its label; or for a run directory that
        holds a run with another configuration.
    RuntimeError
        If a run fails; those before it are finished, those after it not begun.
    """
    unfinished = [run for run in runs if not has_finished(run.config)]
    say(f"{len(runs)} runs, {len(runs) - len(unfinished)} finished before")
    # All before the first one: hours later is late for a misspelt name. Seeds change no key that could be wrong.
    first_of_label: dict[str, RunConfig] = {}
    for run in unfinished:
        first_of_label.setdefault(run.label, run.config)
    for label, config in first_of_label.items():
        try:
            check_new_run(config)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{label}: {error}") from error
    claimed_runs = [go_on(run.config, say) for run in unfinished]
    for run_dir, config in claimed_runs:
        if config.resume:
            # Whatever the last process wrote about its end is no longer true.
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
    with locked(folder) as lock:
        # What an interrupted session has left.
        shutil.rmtree(folder / "flower", ignore_errors=True)
        (folder / "summary.json").unlink(missing_ok=True)
        entries = [{"run-dir": str(run_dir), "resume": config.resume} for run_dir, config in claimed_runs]
        (folder / RUNS).write_text(json.dumps(entries), encoding="utf-8")
        app = assemble_app(folder / "flower" / "app", server=SERVER, client=CLIENT)
        config_file = folder / "flower" / "session.toml"
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
            clusters_at_once=max(clusters_at_once(config) for _, config in claimed_runs),
            joins_ray=True,
            shared_actors=shared_actors(claimed_runs[0][1]),
            worker_imports=worker_imports(claimed_runs[0][1]),
            actor_idle_s=claimed_runs[0][1].runtime.actor_idle,
            watch=watch,
            inherited_fds=[lock],
        )
        outcome = launcher.launch(order)
        watch()
    if outcome.status != FINISHED:
        raise RuntimeError(f"{outcome.error}; logs: {folder / 'logs'}. The same command continues the unfinished runs")
    shutil.rmtree(folder, ignore_errors=True)
