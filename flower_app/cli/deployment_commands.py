"""``collapipe certs``, ``collapipe revoke``, ``collapipe up`` and ``collapipe doctor``."""

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
    from flower_app.deployment.control_unit_box import ControlUnitBox
    from flower_app.deployment.device_box import DeviceBox
    from flower_app.deployment.edge_server import EdgeServer
    from flower_app.deployment.findings import Diagnosis

Certs = Annotated[Path, typer.Option(help="This machine's folder, as collapipe certs made it.")]
State = Annotated[Path, typer.Option(help="Folder for state that must survive a restart.")]
Host = Annotated[str, typer.Option(help="Address of this machine that the others reach.")]
Server = Annotated[str, typer.Option(help="HOST or HOST:PORT of the edge server's SuperLink.")]
ClusterOption = Annotated[int, typer.Option(help="Which cluster this is, from 0.")]
Devices = Annotated[list[int] | None, typer.Option("--device", help="Device that this machine is; repeatable.")]
AllowedApps = Annotated[
    list[str] | None,
    typer.Option("--allow-app", help="Digest of an app that may run beside this release's; repeatable."),
]
AllowedModules = Annotated[
    list[str] | None,
    typer.Option("--allow-module", help="Module or package whose classes a run may name; repeatable."),
]
Data = Annotated[str, typer.Option(help="Folder of this cluster's text, in place of data.path.")]
ModelFolder = Annotated[str, typer.Option(help="Folder of the pretrained model, in place of model.pretrained.")]
DeviceProfileFile = Annotated[str, typer.Option(help="Scenario file of this cluster's devices, or of the network.")]
RayPort = Annotated[int, typer.Option(help="First of 120 ports of this machine's Ray.")]
RuntimePort = Annotated[int, typer.Option(help="The SuperNode's own, within the machine.")]
ControlUnitAddress = Annotated[str, typer.Option("--cu", help="HOST or HOST:PORT of the control unit's Ray.")]
Wait = Annotated[float, typer.Option(help="How long the control unit may take to come up [s].")]
SuperLinkPort = Annotated[int, typer.Option("--port", help="The SuperLink's, for control units.")]
ControlPort = Annotated[int, typer.Option(help="The SuperLink's, for runs, on 127.0.0.1; 0: the one after --port.")]
ObjectStore = Annotated[int, typer.Option(help="Shared memory for TEBs on their way [MB].")]
MetricsPlace = Annotated[
    str,
    typer.Option("--metrics", help="PORT of 127.0.0.1, or HOST:PORT by TLS, where Prometheus asks; empty: none."),
]

# Equal to those of the modules beside, which are not loaded for --help.
_SUPERLINK_PORT, _RAY_PORT, _RUNTIME_PORT, _OBJECT_STORE_MB, _WAIT_S = 9092, 6379, 9094, 512, 60.0
_JOIN_PORT, _CODE_MINUTES = 9095, 60.0
_STATE, _SERVER_CERTS, _RUNS = Path("collapipe-state"), Path("certs/server"), Path("runs")

up = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Start this machine's programs and run them until stopped."
)
doctor = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Find what is wrong on this machine; takes the options of up."
)


def register(app: typer.Typer) -> None:
    """Add the commands of a deployment."""
    app.command()(certs)
    app.command("revoke")(revoke_command)
    app.add_typer(up, name="up")
    app.add_typer(doctor, name="doctor")


def certs(
    server: Annotated[list[str], typer.Option(help="Name or address of the edge server; repeatable.")],
    clusters: Annotated[int, typer.Option(help="How many control units get a folder.")],
    out: Annotated[Path, typer.Option(help="Gets a folder for each machine.")] = Path("certs"),
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the existing certificates.")] = False,
    as_json: Json = False,
) -> None:
    """Make certificates and keys for all machines; what is there already stays."""
    from flower_app.deployment.certs import CertsRequest, make_certificates

    request = CertsRequest(servers=server, clusters=clusters, out=out, days=days, renew=renew)
    folders_made = make_certificates(request, say)
    if as_json:
        print_json(folders_made)


def revoke_command(
    cluster: Annotated[int, typer.Option(help="Cluster whose control unit is no longer trusted.")] = -1,
    box: Annotated[str, typer.Option(help="Instead: one that joined by a code, as collapipe boxes shows it.")] = "",
    out: Annotated[Path, typer.Option(help="The folder that collapipe certs made.")] = Path("certs"),
    as_json: Json = False,
) -> None:
    """Revoke a control unit's certificates and its SuperNode's key; the server's folder goes to the edge server."""
    from flower_app.deployment import revocation
    from flower_app.joining.approval import SEEN_BY_ITSELF, revoke_box
    from flower_app.joining.join_folder import JoinFolder

    folder = JoinFolder(out)
    if bool(box) == (cluster >= 0):
        raise ValueError("revoke: expected --cluster N or --box ID, one of them; collapipe boxes shows the ids")
    if box:
        revoked = revoke_box(folder, box, say)
    else:
        revoked = revocation.revoke(out, cluster, say, SEEN_BY_ITSELF if folder.folder.is_dir() else "")
    if as_json:
        print_json(revoked)


@up.command("edge-server")
def up_edge_server(
    host: Annotated[str, typer.Option(help="Address of this machine that the others reach; empty: --name.")] = "",
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
) -> None:
    """The SuperLink, under TLS, for SuperNodes whose keys are in the certificates' folder."""
    options: dict[str, Any] = {
        "certs": certs,
        "state": state,
        "port": port,
        "control_port": control_port,
        "metrics": metrics,
        "runs": runs,
    }
    if not name:
        if not host:
            raise ValueError(
                "--host: expected an address of this machine, found none; or --name HOST: boxes join by a code"
            )
        _up(_edge_server(host=host, **options))
    from flower_app.joining.edge_joining import EdgeJoining, invite, tell_codes

    # The authority's key is among what is written from here on.
    os.umask(0o077)
    joining = EdgeJoining(name=name, root=certs.parent, join_port=join_port, auto_approve=auto_approve)
    server = _edge_server(host=host or name, **options)
    if certs.name != "server":
        raise ValueError(f"--certs: expected a folder named server, beside the authority's, found {certs}")
    joining.prepare()
    tell_codes(invite(joining.folder, codes, minutes), minutes, say)
    _up(
        replace(
            server,
            companions=joining.programs(server.host, port, server.control),
            companion_ports=[joining.needed_port(server.host)],
        )
    )


@doctor.command("edge-server")
def doctor_edge_server(
    host: Host,
    certs: Certs,
    state: State = _STATE,
    port: SuperLinkPort = _SUPERLINK_PORT,
    control_port: ControlPort = 0,
    as_json: Json = False,
) -> None:
    """Check the edge server."""
    options = locals()
    del options["as_json"]
    from flower_app.deployment.doctor import examine_edge_server

    _tell(examine_edge_server(_edge_server(**options)), as_json)


def _edge_server(*, certs: Path, **options: Any) -> EdgeServer:
    from flower_app.deployment.credentials import ServerFiles
    from flower_app.deployment.edge_server import EdgeServer

    return EdgeServer(certs=ServerFiles(certs), **options)


@up.command("cu")
def up_cu(
    cluster: ClusterOption,
    host: Host,
    server: Server,
    certs: Certs,
    data: Data = "",
    model: ModelFolder = "",
    device_profile: DeviceProfileFile = "",
    state: State = _STATE,
    device: Devices = None,
    allow_app: AllowedApps = None,
    allow_module: AllowedModules = None,
    ray_port: RayPort = _RAY_PORT,
    runtime_port: RuntimePort = _RUNTIME_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
    metrics: MetricsPlace = "",
) -> None:
    """A control unit: the Ray that its devices join, and the SuperNode."""
    _up(_control_unit(**locals()))


@doctor.command("cu")
def doctor_cu(
    cluster: ClusterOption,
    host: Host,
    server: Server,
    certs: Certs,
    data: Data = "",
    model: ModelFolder = "",
    device_profile: DeviceProfileFile = "",
    state: State = _STATE,
    device: Devices = None,
    allow_app: AllowedApps = None,
    allow_module: AllowedModules = None,
    ray_port: RayPort = _RAY_PORT,
    runtime_port: RuntimePort = _RUNTIME_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
    as_json: Json = False,
) -> None:
    """Check a control unit."""
    options = locals()
    del options["as_json"]
    from flower_app.deployment.doctor import examine_control_unit

    _tell(examine_control_unit(_control_unit(**options)), as_json)


def _control_unit(
    *,
    certs: Path,
    device: list[int] | None,
    allow_app: list[str] | None,
    allow_module: list[str] | None,
    **options: Any,
) -> ControlUnitBox:
    from flower_app.deployment.control_unit_box import ControlUnitBox
    from flower_app.deployment.credentials import CuFiles

    return ControlUnitBox(
        certs=CuFiles(certs),
        devices=device or (),
        allowed_apps=allow_app or (),
        allowed_modules=allow_module or (),
        **options,
    )


@up.command("device")
def up_device(
    device: Devices,
    host: Host,
    cu: ControlUnitAddress,
    certs: Certs,
    wait: Wait = _WAIT_S,
    ray_port: RayPort = _RAY_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
) -> None:
    """A device: its node of the control unit's Ray."""
    _up(_device(**locals()))


@doctor.command("device")
def doctor_device(
    device: Devices,
    host: Host,
    cu: ControlUnitAddress,
    certs: Certs,
    wait: Wait = _WAIT_S,
    ray_port: RayPort = _RAY_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
    as_json: Json = False,
) -> None:
    """Check a device."""
    options = locals()
    del options["as_json"]
    from flower_app.deployment.doctor import examine_device

    _tell(examine_device(_device(**options)), as_json)


def _device(*, certs: Path, device: list[int] | None, **options: Any) -> DeviceBox:
    from flower_app.deployment.credentials import DeviceFiles
    from flower_app.deployment.device_box import DeviceBox

    return DeviceBox(certs=DeviceFiles(certs), devices=device or (), **options)


def _up(machine: EdgeServer | ControlUnitBox | DeviceBox) -> None:
    """Run a machine's programs to their end."""
    # Tokens, updates and checkpoints are in what they write: it is for this user alone.
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
