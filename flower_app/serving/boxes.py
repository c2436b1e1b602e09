"""``collapipe serve --superlink``: the order to the boxes of a deployment, handed to its SuperLink."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tomli_w

from client_pipeline import durable
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.serve_config import END
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder, Outcome
from flower_app.runs.doors import SERVE_FOLDER, door_line
from flower_app.runs.run_directory import FINISHED
from flower_app.runs.run_lock import locked, refuse_foreign_files


def order_boxes(run_dir: Path, config: RunConfig, when: str, launcher: Launcher, say: Callable[[str], None]) -> Outcome:
    """Have the boxes of a deployment answer with a run's model, or end their answers; ends when their doors are open.

    Parameters
    ----------
    run_dir : of the run
    config : the run's, with ``serve.head``
    when : ``now`` or ``end``
    launcher : the deployment
    say : gets a line for each box
    """
    folder = run_dir / SERVE_FOLDER
    with locked(run_dir):
        refuse_foreign_files(folder)
        shutil.rmtree(folder, ignore_errors=True)
        app = assemble_app(durable.make_folders(folder) / "flower" / "app")
        config = replace(config, run_dir=str(run_dir), resume=False, serve=replace(config.serve, when=when))
        file = folder / "flower" / "run.toml"
        file.write_text(tomli_w.dumps(nested(config.to_flat())), encoding="utf-8")
        order = LaunchOrder(run_dir=folder, app=app, run_config=file, num_clusters=config.num_clusters, say=say)
        outcome = launcher.launch(order)
    if outcome.status != FINISHED:
        say(f"error: {outcome.error}")
    elif when != END:
        say("the doors stay open without this machine; collapipe serve --superlink ADDRESS --end closes them")
    for door in outcome.summary.get("doors", ()):
        say(door_line(door))
    return outcome
