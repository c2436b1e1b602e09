"""Commands ``collapipe up``, ``collapipe doctor`` and ``collapipe revoke``."""

# Heavy imports stay inside the commands: a device has little memory, and --help answers at once.

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_app.cli.options import Json
from flower_app.console import print_json, say

if TYPE_CHECKING:
    from flower_app.deployment.edge_server import EdgeServer
    from flower_app.deployment.findings import Diagnosis

Certs = Annotated[Path, typer.Option(help="The edge server's folder of certificates.")]
State = Annotated[Path, typer.Option(help="Folder for state that must survive a restart.")]
Devices = Annotated[list[int] | None, typer.Option("--device", help="Device that this machine is; repeatable.")]
AllowedApps = Annotated[
    list[str] | None,
    typer.Option("--allow-app", help="Digest of an app that may run beside this release's; repeatable."),
]
Data = Annotated[str, typer.Option(help="Folder of this cluster's text, in place of data.path.")]
ModelFolder = Annotated[str, typer.Option(help="Folder of the pretrained model, in place of model.pretrained.")]
DeviceProfileFile = Annotated[str, typer.Option(help="Scenario file of this cluster's devices, or of the network.")]
RayPort = Annotated[int, typer.Option(help="First of 120 ports of this machine's Ray.")]
RuntimePort = Annotated[int, typer.Option(help="The SuperNode's own, within the machine.")]
SuperLinkPort = Annotated[int, typer.Option("--port", help="The SuperLink's, for control units.")]
ControlPort = Annotated[int, typer.Option(help="The SuperLink's, for runs, on 127.0.0.1; 0: the one after --port.")]
ReplyLimit = Annotated[int, typer.Option("--reply-mb", help="Most bytes of a cluster's answer to one order [MB].")]
ObjectStore = Annotated[int, typer.Option(help="Shared memory for TEBs on their way [MB].")]
MetricsPlace = Annotated[
    str,
    typer.Option("--metrics", help="PORT of 127.0.0.1, or HOST:PORT by TLS, where Prometheus asks; empty: none."),
]
DoorPlace = Annotated[
    str,
    typer.Option(
        "--serve", help="PORT of 127.0.0.1, or HOST:PORT by TLS, where this cluster answers once trained; off: nowhere."
    ),
]

# Equal to those of the modules beside, which are not loaded for --help.
_SUPERLINK_PORT, _RAY_PORT, _RUNTIME_PORT, _OBJECT_STORE_MB = 9092, 6379, 9094, 512
_JOIN_PORT, _CODE_MINUTES, _REPLY_MB = 9095, 60.0, 4096
_STATE, _SERVER_CERTS, _RUNS = Path("collapipe-state"), Path("certs/server"), Path("runs")

up = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Start this machine's programs and run them until stopped."
)
doctor = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check this machine of a deployment.")


def register(app: typer.Typer) -> None:
    """Add the commands of a deployment."""
    app.command("revoke")(revoke_command)
    app.add_typer(up, name="up")
    app.add_typer(doctor, name="doctor")


def revoke_command(
    cluster: Annotated[int, typer.Option(help="Cluster whose control unit is no longer trusted.")] = -1,
    box: Annotated[str, typer.Option(help="Instead: a box, as collapipe boxes shows it.")] = "",
    out: Annotated[Path, typer.Option(help="Folder with the authority.")] = Path("certs"),
    as_json: Json = False,
) -> None:
    """Take all rights from a control unit or another box, or refuse a box that waits."""
    from flower_app.joining.approval import revoke_box, revoke_cluster
    from flower_app.joining.join_folder import JoinFolder

    if bool(box) == (cluster >= 0):
        raise ValueError("revoke: expected --cluster N or --box ID, one of them; collapipe boxes shows the ids")
    folder = JoinFolder(out)
    revoked = revoke_box(folder, box, say) if box else revoke_cluster(folder, cluster, say)
    if as_json:
        print_json(revoked)


@up.command("edge-server")
def up_edge_server(
    host: Annotated[str, typer.Option(help="Address on which this machine listens; empty: --name.")] = "",
    certs: Certs = _SERVER_CERTS,
    state: State = _STATE,
    port: SuperLinkPort = _SUPERLINK_PORT,
    control_port: ControlPort = 0,
    name: Annotated[
        str, typer.Option(help="Name or address by which boxes reach this machine: prints a code to join by.")
    ] = "",
    join_port: Annotated[int, typer.Option(help="With --name: where boxes ask.")] = _JOIN_PORT,
    codes: Annotated[int, typer.Option(help="With --name: how many codes, one for each box.")] = 1,
    minutes: Annotated[float, typer.Option(help="With --name: how long a code is good.")] = _CODE_MINUTES,
    auto_approve: Annotated[
        bool, typer.Option("--auto-approve", help="With --name: approve every box that shows a good code.")
    ] = False,
    metrics: MetricsPlace = "",
    runs: Annotated[Path, typer.Option(help="With --metrics: the folder of the runs; the newest is shown.")] = _RUNS,
    reply_mb: ReplyLimit = _REPLY_MB,
) -> None:
    """The SuperLink, under TLS, for boxes that have joined; with --name it prints codes by which boxes join."""
    from flower_app.deployment.machine_checks import NeededPort, refuse_taken_ports
    from flower_app.joining.edge_joining import EdgeJoining, invite, tell_codes
    from flower_app.joining.join_code import check_invitation

    options: dict[str, Any] = {
        "certs": certs,
        "state": state,
        "port": port,
        "control_port": control_port,
        "metrics": metrics,
        "runs": runs,
        "reply_mb": reply_mb,
    }
    if not name:
        if not host:
            raise ValueError(
                "--name: expected the name or address at which boxes reach this machine, found none; or --host ADDRESS "
                "alone, where --certs is a copy and the authority is on another machine"
            )
        _up(_edge_server(host=host, **options))
    # From here on the command writes secrets, such as the authority's key.
    os.umask(0o077)
    joining = EdgeJoining(
        name=name, root=certs.parent, join_port=join_port, superlink_port=port, auto_approve=auto_approve
    )
    server = _edge_server(host=host or name, **options)
    if certs.name != "server":
        raise ValueError(f"--certs: expected a folder named server, beside the authority's, found {certs}")
    check_invitation(codes, minutes)
    # Ports may be those of a start that was killed, which up() ends.
    refuse_taken_ports([NeededPort("--host", server.host, 0, "for boxes")])
    joining.prepare(server.host)

    def tell() -> None:
        tell_codes(invite(joining.folder, codes, minutes), minutes, say)

    # A code is useless before the joining service answers.
    companions = joining.programs(server.host, server.control, tell)
    port_of_joining = NeededPort("--join-port", server.host, join_port, "for boxes that join")
    _up(replace(server, companions=companions, companion_ports=[port_of_joining]))


@doctor.command("edge-server")
def doctor_edge_server(
    host: Annotated[str, typer.Option(help="Address on which this machine listens; empty: --name.")] = "",
    certs: Certs = _SERVER_CERTS,
    state: State = _STATE,
    port: SuperLinkPort = _SUPERLINK_PORT,
    control_port: ControlPort = 0,
    name: Annotated[str, typer.Option(help="Name or address by which boxes reach this machine.")] = "",
    as_json: Json = False,
) -> None:
    """Check the edge server."""
    from flower_app.deployment.doctor import examine

    if not (host or name):
        raise ValueError(
            "--host: expected an address of this machine, found none; or --name HOST, as collapipe up has it"
        )
    server = _edge_server(host=host or name, certs=certs, state=state, port=port, control_port=control_port)
    _tell(examine(server), as_json)


@doctor.command("box")
def doctor_box(state: State = _STATE, as_json: Json = False) -> None:
    """Check a box that has joined: a control unit or a device."""
    from flower_app.deployment.doctor import examine
    from flower_app.joining.joined_box import JOINED, machine_of
    from flower_app.joining.newcomer import BoxFolder

    folder = BoxFolder(state / JOINED)
    if not folder.box_file.is_file():
        raise ValueError(f"--state: expected the folder of a box that has joined, found no {folder.box_file}")
    _tell(examine(machine_of(folder.box(), folder, state)), as_json)


def _edge_server(*, certs: Path, **options: Any) -> EdgeServer:
    from flower_app.deployment.credentials import ServerFiles
    from flower_app.deployment.edge_server import EdgeServer

    return EdgeServer(certs=ServerFiles(certs), **options)


def _up(machine: EdgeServer) -> None:
    """Run a machine's programs to their end."""
    # The programs write tokens, updates and checkpoints: only this user may read them.
    os.umask(0o077)
    raise typer.Exit(machine.up(say))


def _tell(diagnosis: Diagnosis, as_json: bool) -> None:
    """Print the findings; exit code 1 if a check failed."""
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        for finding in diagnosis.findings:
            typer.echo(str(finding))
    raise typer.Exit(0 if diagnosis.passed else 1)
