"""Several trainings one after the other in one simulation: SuperLink, Ray and client processes start once for all.

Starting them takes longer than a small training. Each run still has a run directory of its own, with control units,
devices and a decoder service of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import tomli_w

from flower_app.config.run_config import RunConfig, nested
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.flower_run import launch
from flower_app.launch.session_app import RUNS
from flower_app.launch.simulation import claim
from flower_app.runs.run_directory import FINISHED, read_summary, write_config
from flower_app.runs.run_lock import locked

SERVER, CLIENT = "flower_app.launch.session_app:server", "flower_app.launch.session_app:client"


def train_each(configs: Sequence[RunConfig], folder: Path, say: Callable[[str], None]) -> None:
    """Train each configuration in its ``run-dir``, in their order, in simulations that they share.

    Parameters
    ----------
    configs : each with a ``run-dir`` that holds no run yet
    folder : for the simulation itself, removed when it has finished
    say : told of every run that has finished

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        For a configuration that cannot run; those before it are not trained either.
    RuntimeError
        If a run fails; those before it are finished, those after it not begun.
    """
    claimed = [claim(config) for config in configs]
    for run_dir, config in claimed:
        write_config(run_dir, config)
    # A node for each cluster: runs with as many clusters share a simulation.
    for count in dict.fromkeys(config.num_clusters for _, config in claimed):
        _simulate([entry for entry in claimed if entry[1].num_clusters == count], count, folder, say)


def _simulate(
    claimed: Sequence[tuple[Path, RunConfig]], num_clusters: int, folder: Path, say: Callable[[str], None]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as lock:
        # What an interrupted session has left.
        shutil.rmtree(folder / "flower", ignore_errors=True)
        (folder / "summary.json").unlink(missing_ok=True)
        (folder / RUNS).write_text(json.dumps([str(run_dir) for run_dir, _ in claimed]), encoding="utf-8")
        app = assemble_app(folder / "flower" / "app", server=SERVER, client=CLIENT)
        config_file = folder / "flower" / "session.toml"
        first = claimed[0][1].to_flat() | {"run-dir": str(folder), "name": "session"}
        config_file.write_text(tomli_w.dumps(nested(first)), encoding="utf-8")
        waiting = [run_dir for run_dir, _ in claimed]

        def watch() -> None:
            while waiting and (summary := read_summary(waiting[0])) is not None:
                run_dir, left = waiting.pop(0), len(waiting)
                say(f"{run_dir.name}: {summary.get('status')} in {summary.get('wall_s', 0):.0f} s, {left} left")

        outcome = launch(folder, app, config_file, num_clusters, watch, kept=[lock])
        watch()
    if outcome.status != FINISHED:
        raise RuntimeError(
            f"{outcome.error}; logs: {folder / 'logs'}. The same command goes on with the runs that have not finished"
        )
    shutil.rmtree(folder, ignore_errors=True)
