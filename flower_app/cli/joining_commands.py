"""``collapipe join`` on a box; ``invite``, ``boxes`` and ``approve`` on the edge server."""

# Heavy imports stay inside the commands: a device has little memory, and --help answers at once.

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flower_app.cli import deployment_commands as options
from flower_app.cli.options import Json
from flower_app.console import print_json, say

Root = Annotated[Path, typer.Option(help="Folder with the authority, beside the edge server's --certs.")]
_ROOT = Path("certs")
_APPROVAL_S = 1_800.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(join)
    app.command("invite")(invite_command)
    app.command()(boxes)
    app.command()(approve)


def join(
    code: Annotated[str, typer.Argument(help="As the edge server printed it; without: as what joined before.")] = "",
    data: options.Data = "",
    control_unit: Annotated[
        bool, typer.Option("--control-unit", help="A control unit without text of its own.")
    ] = False,
    cluster: Annotated[int, typer.Option(help="A device of this cluster; of a control unit: its number.")] = -1,
    device: options.Devices = None,
    host: Annotated[str, typer.Option(help="Address of this machine; empty: that on the way to the server.")] = "",
    model: options.ModelFolder = "",
    device_profile: options.DeviceProfileFile = "",
    state: options.State = options._STATE,
    allow_app: options.AllowedApps = None,
    allow_module: options.AllowedModules = None,
    ray_port: options.RayPort = options._RAY_PORT,
    runtime_port: options.RuntimePort = options._RUNTIME_PORT,
    object_store_mb: options.ObjectStore = options._OBJECT_STORE_MB,
    metrics: options.MetricsPlace = "",
    wait: Annotated[float, typer.Option(help="How long to wait for the approval [s].")] = _APPROVAL_S,
) -> None:
    """Join a deployment by a code, as a control unit (--data) or a device (--cluster), and run until stopped."""
    from flower_app.joining.joined_box import JoiningBox

    # Keys and the cluster's secret are in what it writes: it is for this user alone.
    os.umask(0o077)
    box = JoiningBox(
        code=code,
        state=state,
        data=data,
        control_unit=control_unit,
        cluster=cluster,
        devices=device or (),
        host=host,
        model=model,
        device_profile=device_profile,
        allowed_apps=allow_app or (),
        allowed_modules=allow_module or (),
        ray_port=ray_port,
        runtime_port=runtime_port,
        object_store_mb=object_store_mb,
        metrics=metrics,
        wait=wait,
    )
    raise typer.Exit(box.up(say))


def invite_command(
    codes: Annotated[int, typer.Option(help="How many, one for each box.")] = 1,
    minutes: Annotated[float, typer.Option(help="How long they are good.")] = options._CODE_MINUTES,
    out: Root = _ROOT,
    as_json: Json = False,
) -> None:
    """Print codes by which boxes join; each is for one box."""
    from flower_app.joining.edge_joining import invite, tell_codes
    from flower_app.joining.join_folder import JoinFolder

    made = invite(JoinFolder(out), codes, minutes)
    if as_json:
        print_json({"codes": [str(code) for code in made], "minutes": minutes})
    else:
        tell_codes(made, minutes, say)


def boxes(out: Root = _ROOT, as_json: Json = False) -> None:
    """List the boxes that have asked to join: waiting, approved, refused or revoked."""
    from flower_app.joining.approval import boxes_table
    from flower_app.joining.join_folder import JoinFolder

    folder = JoinFolder(out)
    folder.check()
    rows, unused = boxes_table(folder), folder.num_unused_codes()
    if as_json:
        print_json({"boxes": rows, "unused_codes": unused})
        return
    for row in rows:
        place = row["name"] or (row["kind"] if row["cluster"] is None else f"{row['kind']} of cluster {row['cluster']}")
        typer.echo(f"{row['box']}  {row['status']:<8}  {place:<24}  {row['host']}")
    say(f"{len(rows)} boxes; {unused} codes that nobody has used yet")


def approve(
    box: Annotated[str, typer.Argument(help="Its id, or the beginning of it; the box shows the same.")] = "",
    all_waiting: Annotated[bool, typer.Option("--all", help="All that wait, control units first.")] = False,
    out: Root = _ROOT,
    as_json: Json = False,
) -> None:
    """Let a box in that has asked: its key is signed, and its SuperNode may connect; exit 1 if --all leaves one out."""
    from flower_app.joining.approval import approve_box
    from flower_app.joining.join_folder import WAITING, JoinFolder

    folder = JoinFolder(out)
    folder.check()
    if bool(box) == all_waiting:
        raise ValueError("approve: expected the id of a box, or --all; collapipe boxes shows them")
    waiting = [other for other in folder.boxes() if other.status == WAITING]
    chosen = sorted(waiting, key=lambda other: not other.is_control_unit) if all_waiting else [folder.find(box)]
    approved: list[dict[str, str]] = []
    refused: list[dict[str, str]] = []
    for other in chosen:
        try:
            name = approve_box(folder, other.box_id).name
        except ValueError as error:
            if not all_waiting:
                raise
            refused.append({"box": other.box_id, "reason": str(error)})
            say(f"{other.box_id} is not let in: {error}")
        else:
            approved.append({"box": other.box_id, "name": name})
            say(f"{other.box_id} is {name}")
    if as_json:
        print_json({"approved": approved, "refused": refused})
    if refused:
        raise typer.Exit(1)
