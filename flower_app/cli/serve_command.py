"""``collapipe serve``."""

# Heavy imports stay inside the command: --help answers at once.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_app.cli.options import AllowedModules, Run, Sets
from flower_app.console import say

_READER = "Prompts and answers stay on this machine, and are written to no file."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    run: Run = "latest",
    devices: Annotated[int, typer.Option(min=0, help="Processes that share the layers; 0: this one alone.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each device.")] = 1,
    host: Annotated[str, typer.Option(help="Address of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8080,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate; wanted beyond the loopback.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Draw another key; the old one ends.")] = False,
    most_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of prompts and answers that are kept at once; 0: 16384.")
    ] = 0,
    superlink: Annotated[
        str, typer.Option(help="Of a deployment: its boxes answer, at the doors that their owners have opened.")
    ] = "",
    certs: Annotated[Path, typer.Option(help="With --superlink: the edge server's folder of certificates.")] = Path(
        "certs/server"
    ),
    control_port: Annotated[int, typer.Option(help="With --superlink: that of collapipe up edge-server.")] = 0,
    end: Annotated[bool, typer.Option("--end", help="With --superlink: let the boxes' doors close.")] = False,
    sets: Sets = None,
    allow_module: AllowedModules = None,
) -> None:
    """Answer over OpenAI's API, and on a page, with the model of a run until Ctrl-C; or let boxes answer."""
    if end and not superlink:
        raise ValueError("--end: expected with --superlink ADDRESS; Ctrl-C ends the answers of this machine")
    if superlink:
        raise typer.Exit(_serve_on_boxes(run, superlink, certs, control_port, end, sets, allow_module))
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key: expected both or neither, found one")
    if devices:
        from client_pipeline.runtime.ray.private_ray import prepare_private_ray

        prepare_private_ray()
    from flower_app.config.sources import load_stored_config
    from flower_app.runs.run_directory import CONFIG, find_run
    from flower_app.saved_model import read_model
    from flower_app.serving.door_key import door_key
    from flower_app.serving.door_server import announce, open_door, serve_door
    from flower_app.serving.run_model import served_run

    tls = (tls_cert, tls_key) if tls_cert and tls_key else None
    with open_door(host, port, tls is not None) as listener:
        run_dir = find_run(run)
        config = load_stored_config(run_dir / CONFIG, sets or (), allow_module or ())
        stored = read_model(run_dir, config.model.family, config.task.name)
        key, digest = door_key(run_dir, new_key)
        with served_run(run_dir, stored, devices, threads, say, most_tokens, config.task) as served:
            announce(served, listener, key, tls is not None, _READER, say)
            serve_door(served, digest, listener, reader=_READER, tls=tls)


def _serve_on_boxes(
    run: str,
    superlink: str,
    certs: Path,
    control_port: int,
    end: bool,
    sets: list[str] | None,
    allow_module: list[str] | None,
) -> int:
    from flower_app.config.serve_config import END, NOW
    from flower_app.config.sources import load_stored_config
    from flower_app.deployment.deployed_run import Deployment
    from flower_app.runs.run_directory import CONFIG, find_run
    from flower_app.serving.boxes import order_boxes

    run_dir = find_run(run)
    config = load_stored_config(run_dir / CONFIG, sets or (), allow_module or ())
    deployment = Deployment.of(superlink, certs, control_port)
    return order_boxes(run_dir, config, END if end else NOW, deployment, say).exit_code
