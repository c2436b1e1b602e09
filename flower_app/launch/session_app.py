"""Flower app of a session: the app of one run, again and again; see :mod:`flower_app.launch.run_series`.

A file of the session's folder names the current run: all processes of the session run on one machine, and one run after
the other.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from client_pipeline import durable
from flower_app import client_app
from flower_app.error_text import error_text
from flower_app.runs.phases import LOADING, begin_phase
from flower_app.runs.run_directory import FINISHED, read_run_config, write_failure, write_summary
from flower_app.runs.run_lock import serving
from flower_app.runs.run_logs import ERROR_LOG, LOGS
from flower_app.training.actor_start import start_actors

RUNS = "runs.json"
"""The session's runs, in their order: each run's directory, and whether it goes on from its checkpoint."""
_CURRENT = "current.json"

server = ServerApp()
client = ClientApp()


@server.main()
def train_runs(grid: Grid, context: Context) -> None:
    """Train the session's runs, up to the first that fails."""
    # Before torch is imported: the actors import it at the same time.
    start_actors(context.run_config, grid)
    session = Path(str(context.run_config["run-dir"]))
    try:
        for number, entry in enumerate(json.loads((session / RUNS).read_text(encoding="utf-8"))):
            run_dir = Path(entry["run-dir"])
            current = json.dumps({"number": number, "run-dir": str(run_dir)})
            durable.write_text(session / _CURRENT, current, lasting=False)
            try:
                _train(run_dir, entry["resume"], grid)
            except BaseException as error:
                log = run_dir / LOGS / ERROR_LOG
                raise RuntimeError(f"{run_dir.name}: {error_text(error, log)}") from error
    except BaseException as error:
        # On a full disk the launcher reports the end of the session.
        with suppress(OSError):
            write_failure(session, error)
        raise
    write_summary(session, FINISHED)


def _train(run_dir: Path, is_resumed: bool, grid: Grid) -> None:
    # The processes of client apps import this module, too, and need no torch.
    from flower_app.training.prepared_run import prepare
    from flower_app.training.training_run import train_prepared

    with serving(run_dir):
        try:
            # The directory is complete; resume is not part of the saved configuration.
            config = replace(read_run_config(run_dir), run_dir=str(run_dir), resume=is_resumed)
            begin_phase(run_dir, LOADING)
            start_actors(config.to_flat(), grid)
            train_prepared(prepare(config, run_dir), grid)
        except BaseException as error:
            with suppress(OSError):
                write_failure(run_dir, error)
            raise


@client.query("setup")
def set_up_current_run(message: Message, context: Context) -> Message:
    """Start the current run's control unit."""
    return client_app.answer_setup(message, _of_current_run(context))


@client.train()
def train_current_run(message: Message, context: Context) -> Message:
    """Train a round of the current run, within the mods that this run asks for."""
    return client_app.answer_training(message, _of_current_run(context))


def _of_current_run(context: Context) -> Context:
    """Return the context as the current run's own app would have it, its run id included; the state is the same."""
    session = Path(str(context.run_config["run-dir"]))
    current = json.loads((session / _CURRENT).read_text(encoding="utf-8"))
    return Context(
        run_id=context.run_id + int(current["number"]),
        node_id=context.node_id,
        node_config=context.node_config,
        state=context.state,
        run_config=read_run_config(Path(current["run-dir"])).to_flat(),
        series_id=context.series_id,
    )
