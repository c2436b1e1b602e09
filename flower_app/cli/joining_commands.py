"""Commands ``collapipe join`` on a box; ``invite``, ``boxes`` and ``approve`` on the edge server."""

# Heavy imports stay inside the commands: a device has little memory, and --help answers at once.

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client_pipeline.counted import counted
from flower_app.cli import deployment_commands as options
from flower_app.cli.options import AllowedModules, Json
from flower_app.console import print_json, say

if TYPE_CHECKING:
    from flower_app.joining.join_folder import Box

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
    code: Annotated[str, typer.Argument(help="Code, or file of invite --file; without: start again.")] = "",
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
    allow_module: AllowedModules = None,
    ray_port: options.RayPort = options._RAY_PORT,
    runtime_port: options.RuntimePort = options._RUNTIME_PORT,
    object_store_mb: options.ObjectStore = options._OBJECT_STORE_MB,
    metrics: options.MetricsPlace = "",
    serve: options.DoorPlace = "",
    wait: Annotated[float, typer.Option(help="How long to wait for the approval [s].")] = _APPROVAL_S,
) -> None:
    """Join a deployment by a code, as a control unit (--data) or a device (--cluster), and run until stopped."""
    values = {name: value for name, value in locals().items() if name not in ("device", "allow_app", "allow_module")}
    from flower_app.joining.joined_box import JoiningBox

    # The box writes keys and the cluster's secret: only this user may read them.
    os.umask(0o077)
    box = JoiningBox(**values, devices=device or (), allowed_apps=allow_app or (), allowed_modules=allow_module or ())
    raise typer.Exit(box.up(say))


def invite_command(
    codes: Annotated[int, typer.Option(help="How many, one for each box.")] = 1,
    minutes: Annotated[float, typer.Option(help="Lifetime of a code.")] = options._CODE_MINUTES,
    file: Annotated[
        Path | None, typer.Option(help="Write one code to this file, for a box without a network to the edge server.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Make the authority for an edge server with this name or address, if there is none.")
    ] = "",
    out: Root = _ROOT,
    as_json: Json = False,
) -> None:
    """Make codes by which boxes join; each is for one box."""
    from flower_app.joining.edge_joining import EdgeJoining, invite, tell_codes
    from flower_app.joining.join_folder import JoinFolder

    if file is not None and codes != 1:
        raise ValueError(f"--codes: expected 1 with --file, found {codes}; repeat the command for another file")
    os.umask(0o077)
    if name:
        EdgeJoining(name=name, root=out).prepare()
    made = invite(JoinFolder(out), codes, minutes)
    if file is not None:
        from flower_app.deployment.certificate_authority import write_secret

        write_secret(file, f"{made[0]}\n".encode())
        say(f"{file} is for one box within {minutes:g} minutes, and a secret until it is used; on the box:")
        say(f"  collapipe join {file.name} --host ADDRESS --data FOLDER")
        say("with --cluster 0 instead of --data FOLDER on a device of cluster 0")
    elif not as_json:
        tell_codes(made, minutes, say)
    if as_json:
        print_json({"codes": [str(code) for code in made], "minutes": minutes})


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
    say(f"{counted(len(rows), 'box', 'boxes')}; {counted(unused, 'code')} that nobody has used yet")


def approve(
    box: Annotated[str, typer.Argument(help="Its id, or the beginning of it; the box shows the same.")] = "",
    all_waiting: Annotated[bool, typer.Option("--all", help="All that wait, control units first.")] = False,
    file: Annotated[Path | None, typer.Option(help="Request file of a box; writes the answer file beside it.")] = None,
    out: Root = _ROOT,
    as_json: Json = False,
) -> None:
    """Let a box in that has asked: sign its key, and let its SuperNode connect; exit 1 if --all leaves one out."""
    from flower_app.joining.approval import approve_box, approve_file, approve_waiting, shared_address_warning
    from flower_app.joining.join_folder import JoinFolder

    folder = JoinFolder(out)
    folder.check()
    if bool(box) + all_waiting + (file is not None) != 1:
        raise ValueError(
            "approve: expected the id of a box, --all or --file, one of them; collapipe boxes shows the ids"
        )
    approved: list[dict[str, str]] = []
    refused: list[dict[str, str]] = []

    def tell(let_in: Box) -> None:
        approved.append({"box": let_in.box_id, "name": let_in.name})
        say(f"{let_in.box_id} is {let_in.name}")
        if warning := shared_address_warning(folder, let_in):
            say(warning)

    if file is not None:
        let_in, answer_file = approve_file(folder, file)
        tell(let_in)
        say(f"put {answer_file} beside the box's invitation, and repeat collapipe join there")
    elif box:
        tell(approve_box(folder, folder.find(box).box_id))
    else:
        for other, reason in approve_waiting(folder):
            if reason:
                refused.append({"box": other.box_id, "reason": reason})
                say(f"{other.box_id} is not let in: {reason}")
            else:
                tell(other)
    if as_json:
        print_json({"approved": approved, "refused": refused})
    if refused:
        raise typer.Exit(1)
