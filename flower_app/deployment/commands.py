"""``collapipe certs``, ``collapipe up`` and ``collapipe doctor``."""

# Heavy imports stay inside the commands: a device has little memory, and --help answers at once.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_app.console import print_json, say

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output and nothing else.")]
Certs = Annotated[Path, typer.Option(help="This machine's folder, as collapipe certs made it.")]
State = Annotated[Path, typer.Option(help="Folder for what must outlive a restart.")]
Host = Annotated[str, typer.Option(help="Address of this machine that the others reach.")]
Server = Annotated[str, typer.Option(help="HOST or HOST:PORT of the edge server's SuperLink.")]
Cluster = Annotated[int, typer.Option(help="Which cluster this is, from 0.")]
Devices = Annotated[list[int] | None, typer.Option("--device", help="Device that this machine is; repeatable.")]
Data = Annotated[str, typer.Option(help="Folder of this cluster's text, in place of data.path.")]
DeviceProfile = Annotated[str, typer.Option(help="Scenario file that says what this cluster's devices are.")]
RayPort = Annotated[int, typer.Option(help="First of 120 ports of this machine's Ray.")]
RuntimePort = Annotated[int, typer.Option(help="The SuperNode's own, within the machine.")]
SuperLinkPort = Annotated[int, typer.Option("--port", help="The SuperLink's.")]
ObjectStore = Annotated[int, typer.Option(help="Shared memory for TEBs on their way [MB].")]

# Equal to those of the modules beside, which are not loaded for --help.
_SUPERLINK_PORT, _RAY_PORT, _RUNTIME_PORT, _OBJECT_STORE_MB = 9092, 6379, 9094, 512

up = typer.Typer(no_args_is_help=True, help="Start what belongs on this machine, and stay until told to end.")


def register(app: typer.Typer) -> None:
    """Add the commands of a deployment."""
    app.command()(certs)
    app.add_typer(up, name="up")


def certs(
    server: Annotated[list[str], typer.Option(help="Name or address of the edge server; repeatable.")],
    clusters: Annotated[int, typer.Option(help="How many control units get a folder.")],
    out: Annotated[Path, typer.Option(help="Gets a folder for each machine.")] = Path("certs"),
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="New certificates in place of those there.")] = False,
    as_json: Json = False,
) -> None:
    """Make certificates and keys for all machines; what is there already stays."""
    from flower_app.deployment.certs import CertsRequest, make_certificates

    request = CertsRequest(servers=server, clusters=clusters, out=out, days=days, renew=renew)
    found = make_certificates(request, say)
    if as_json:
        print_json(found)


@up.command("edge-server")
def up_edge_server(
    host: Host,
    certs: Certs,
    state: State = Path("collapipe-state"),
    port: SuperLinkPort = _SUPERLINK_PORT,
) -> None:
    """The SuperLink, under TLS, for SuperNodes whose keys are in the certificates' folder."""
    from flower_app.deployment.credentials import ServerFiles
    from flower_app.deployment.edge_server import EdgeServer

    raise typer.Exit(EdgeServer(host=host, certs=ServerFiles(certs), state=state, port=port).up(say))


@up.command("cu")
def up_cu(
    cluster: Cluster,
    host: Host,
    server: Server,
    certs: Certs,
    data: Data = "",
    device_profile: DeviceProfile = "",
    state: State = Path("collapipe-state"),
    device: Devices = None,
    ray_port: RayPort = _RAY_PORT,
    runtime_port: RuntimePort = _RUNTIME_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
) -> None:
    """A control unit: the Ray that its devices join, and the SuperNode."""
    from flower_app.deployment.control_unit_box import ControlUnitBox
    from flower_app.deployment.credentials import CuFiles

    box = ControlUnitBox(
        cluster=cluster,
        host=host,
        server=server,
        certs=CuFiles(certs),
        state=state,
        data=data,
        device_profile=device_profile,
        devices=device or (),
        ray_port=ray_port,
        runtime_port=runtime_port,
        object_store_mb=object_store_mb,
    )
    raise typer.Exit(box.up(say))


@up.command("device")
def up_device(
    device: Devices,
    host: Host,
    cu: Annotated[str, typer.Option(help="HOST or HOST:PORT of the control unit's Ray.")],
    certs: Certs,
    wait: Annotated[float, typer.Option(help="How long the control unit may take to come up [s].")] = 60.0,
    ray_port: RayPort = _RAY_PORT,
    object_store_mb: ObjectStore = _OBJECT_STORE_MB,
) -> None:
    """A device: its node of the control unit's Ray."""
    from flower_app.deployment.credentials import DeviceFiles
    from flower_app.deployment.device_box import DeviceBox

    box = DeviceBox(
        devices=device or (),
        host=host,
        cu=cu,
        certs=DeviceFiles(certs),
        wait=wait,
        ray_port=ray_port,
        object_store_mb=object_store_mb,
    )
    raise typer.Exit(box.up(say))
