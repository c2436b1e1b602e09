"""``collapipe doctor``: everything that a machine of a deployment needs, checked one by one."""

from __future__ import annotations

from collections.abc import Iterator

from client_pipeline.counted import counted
from client_pipeline.link.hosts import split_address
from flower_app.deployment.certificate_checks import (
    check_certificate,
    check_certificate_files,
    check_cluster_certificate,
    check_known_supernodes,
    check_supernode_key,
)
from flower_app.deployment.control_unit_box import RUNTIME_HOST, ControlUnitBox, server_address
from flower_app.deployment.deployed_run import DECODER_PORT
from flower_app.deployment.device_box import DeviceBox, cu_address
from flower_app.deployment.edge_server import EdgeServer
from flower_app.deployment.findings import Diagnosis, Finding, failure, ok
from flower_app.deployment.machine_checks import (
    check_accelerator,
    check_data,
    check_memory,
    check_port,
    check_ports,
    check_state_folder,
    check_versions,
)
from flower_app.deployment.network_checks import check_ray, check_superlink, check_supernode
from flower_app.deployment.programs import listens

SERVER_MB, CU_MB, DEVICE_MB = 1500, 1500, 600
"""Memory of SuperLink and server app; of SuperNode, client app, control unit and Ray's head; of a node and an actor."""


def examine(machine: EdgeServer | ControlUnitBox | DeviceBox) -> Diagnosis:
    """Check a machine, whether its programs run or not."""
    findings = [*check_versions(), *check_certificate_files(machine.certs)]
    if isinstance(machine, EdgeServer):
        return Diagnosis("edge-server", [*findings, *_edge_server(machine)])
    findings += [*check_certificate(machine.certs), *check_cluster_certificate(machine.certs, machine.host)]
    if isinstance(machine, ControlUnitBox):
        return Diagnosis("cu", [*findings, *_control_unit(machine)])
    return Diagnosis("device", [*findings, *_device(machine)])


def _edge_server(server: EdgeServer) -> Iterator[Finding]:
    files = server.certs
    yield from check_certificate(files, server.host)
    yield from check_known_supernodes(files)
    yield from check_state_folder(server.state)
    yield from check_memory(SERVER_MB)
    yield from check_accelerator()
    if files.ca.is_file() and listens(server.host, server.port):
        yield from _own_superlink(server)
    else:
        control = split_address("control", server.control)
        yield from check_port("ports", server.host, server.port, "the SuperLink's")
        yield from check_port("ports", control.host, control.port, "the SuperLink's control")
    if listens(server.host, DECODER_PORT):
        yield ok("ports", f"port {DECODER_PORT} of {server.host}, the decoder's, is in use: by a run, it seems")
    else:
        yield from check_port("ports", server.host, DECODER_PORT, "the decoder's")


def _own_superlink(server: EdgeServer) -> Iterator[Finding]:
    """Tell this edge server's SuperLink from another program on its port."""
    answers = list(check_superlink(server.address, server.certs.ca))
    if all(finding.status != "failed" for finding in answers):
        yield from answers
        return
    yield failure(
        "ports",
        f"port {server.port} of {server.host} is in use, and not by this SuperLink: {answers[0].found}",
        f"find it with: ss -ltnp 'sport = :{server.port}'; end it, or choose another --port",
    )


def _control_unit(box: ControlUnitBox) -> Iterator[Finding]:
    files = box.certs
    yield from check_supernode_key(files)
    yield from check_data(box.data)
    yield from check_state_folder(box.state)
    profile, described = _profile(box)
    yield from profile
    yield from check_memory(CU_MB + box.object_store_mb, box.object_store_mb)
    if box.devices:
        yield from check_accelerator()
    if files.ca.is_file():
        yield from check_superlink(str(server_address(box.server)), files.ca)
    if listens(box.host, box.ray_port):
        yield from check_ray(f"{box.host}:{box.ray_port}", files, box.host, described, is_head=True)
        yield from check_supernode(box.runtime_port)
    else:
        yield from check_ports(box.host, box.ray_node(box.state).services)
        yield from check_port("ports", RUNTIME_HOST, box.runtime_port, "the SuperNode's own")


def _profile(box: ControlUnitBox) -> tuple[list[Finding], int | None]:
    """Check the device profile; returns the findings, and the number of devices that it describes."""
    if not box.device_profile:
        return [], None
    from flower_app.node.config import profile_devices

    try:
        devices = profile_devices(box.device_profile, box.cluster)
    except (ValueError, OSError) as error:
        remedy = "write it with collapipe profile, or leave --device-profile out"
        return [failure("device profile", f"{box.device_profile}: {error}", remedy)], None
    return [
        ok(
            "device profile",
            f"{box.device_profile} describes {counted(len(devices), 'device')} of cluster {box.cluster}",
        )
    ], len(devices)


def _device(box: DeviceBox) -> Iterator[Finding]:
    files = box.certs
    yield from check_memory(DEVICE_MB + box.object_store_mb, box.object_store_mb)
    yield from check_accelerator()
    services = box.ray_node(files.folder).services
    if listens(box.host, services["node-manager-port"]):
        yield ok("ports", f"a Ray node runs at {box.host}:{services['node-manager-port']}")
    else:
        yield from check_ports(box.host, services)
    yield from check_ray(str(cu_address(box.cu)), files, box.host)
