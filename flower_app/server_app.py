"""The Flower server app: one training run, from the configuration to the summary.

Modules that import torch are imported after the start of the actors, which import it at the same time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_app.config.run_config import RunConfig
from flower_app.config.serve_config import END, NOW
from flower_app.launch.processes import MARK
from flower_app.runs import run_directory
from flower_app.runs.phases import LOADING, begin_phase
from flower_app.runs.run_lock import serving
from flower_app.training.actor_start import start_actors

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one training, from the configuration to the summary; or give a trained model to the boxes."""
    if context.run_config.get("serve.when") in (NOW, END):
        from flower_app.training.given_model import serve_on_boxes

        serve_on_boxes(RunConfig.from_flat(context.run_config), grid)
        return
    start_actors(context.run_config, grid)
    from flower_app.gguf_import import with_gguf_imported
    from flower_app.report.pictures import write_pictures
    from flower_app.training.cluster_setup import fitted_to_nodes
    from flower_app.training.prepared_run import prepare
    from flower_app.training.training_run import train_prepared

    config = fitted_to_nodes(RunConfig.from_flat(context.run_config), grid)
    if config.run_dir:
        # `collapipe run` has made and claimed it; under plain `flwr run` it may be new.
        run_dir = Path(config.run_dir).resolve()
        if not config.resume and run_directory.read_summary(run_dir) is not None:
            raise ValueError(f"run-dir: {run_dir} holds a run already; name another, or leave run-dir empty")
        run_dir.mkdir(parents=True, exist_ok=True)
    else:
        run_dir = run_directory.create_run_directory(config.runs_dir, config.name)
    print(run_dir, flush=True)
    # What is written of a failure belongs to the run that holds the directory.
    with serving(run_dir):
        if not config.resume:
            run_directory.check_unused(run_dir)
        try:
            # `collapipe run` has named the folder; under plain `flwr run` it may be the file.
            config = with_gguf_imported(config, lambda text: print(text, flush=True))
            if not config.resume:
                run_directory.write_config(run_dir, config)
            begin_phase(run_dir, LOADING)
            train_prepared(prepare(config, run_dir), grid)
            # `collapipe run` draws the report itself.
            if not (config.run_dir and MARK in os.environ):
                write_pictures(run_dir)
        except BaseException as error:
            # On a full disk the launcher says how the run ended.
            with suppress(OSError):
                run_directory.write_failure(run_dir, error)
            raise
