"""Ray node of one machine: its command, ports, secret and certificate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import is_loopback, split_address
from client_pipeline.runtime.ray.placement import NODE_CPUS
from client_pipeline.runtime.ray.private_ray import RAY_SETTINGS, prepare_private_ray, without_secrets
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.system.devices import device_resource
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.machine_checks import NeededPort
from flower_app.deployment.programs import Program, listens, run_programs

FIRST_PORT = 6379
_SLOW_S = 300.0
"""Ray gives itself half a minute to start; slow machines need another attempt [s]."""
PORTS = 120
"""Ports of a node, from its first: the head's own, six services, and the workers' from the twentieth on."""
_SERVICES = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)
_RAY_CLIENT = "ray-client-server-port"
"""Ray Client's server comes with every head. It takes callers with the cluster's secret and certificate alone."""
_WORKERS = 20


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """Options of ``ray start``."""

    host: str
    """Address of this machine that the others of the cluster reach."""
    head: str = ""
    """``host:port`` of the control unit's Ray; empty: this node is the head."""
    devices: Sequence[int] = ()
    """Devices that this machine is."""
    first_port: int = FIRST_PORT
    object_store_mb: int = 512
    """Shared memory for TEBs on their way [MB]."""
    temp: Path
    """A private folder for sockets and logs; a short path, for the names of sockets have 107 characters at most."""

    def __post_init__(self) -> None:
        if not 1024 <= self.first_port <= 65535 - PORTS:
            raise ValueError(f"--ray-port: expected 1024 to {65535 - PORTS}, found {self.first_port}")
        if self.object_store_mb < 80:
            raise ValueError(f"--object-store-mb: expected at least 80, found {self.object_store_mb}")
        if min(self.devices, default=0) < 0 or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"--device: expected different numbers from 0, found {', '.join(map(str, self.devices))}")

    @property
    def services(self) -> Mapping[str, int]:
        """Port of each service, by the name of Ray's option."""
        names = _SERVICES if self.head else (*_SERVICES, _RAY_CLIENT)
        head_services = {} if self.head else {"port": self.first_port}
        return head_services | {name: self.first_port + 1 + i for i, name in enumerate(names)}

    def needed_ports(self) -> list[NeededPort]:
        """The ports of its services; the head's own first."""
        head_port = {} if self.head else {"head": self.first_port}
        ports = head_port | {name.removesuffix("-port"): port for name, port in self.services.items() if name != "port"}
        return [NeededPort("--ray-port", self.host, port, f"of Ray's {name}") for name, port in ports.items()]

    def command(self) -> list[str]:
        """The command line."""
        # The monitor would add machines to a cloud's cluster.
        new_head = ["--head", "--include-dashboard", "false", "--no-monitor"]
        head_options = ["--address", self.head] if self.head else new_head
        ports = [text for name, port in self.services.items() for text in (f"--{name}", str(port))]
        resources = json.dumps({device_resource(k): 1 for k in self.devices})
        return [
            os.path.join(sysconfig.get_path("scripts"), "ray"),
            "start",
            *head_options,
            *ports,
            *("--min-worker-port", str(self.first_port + _WORKERS)),
            *("--max-worker-port", str(self.first_port + PORTS - 1)),
            *("--node-ip-address", self.host),
            *("--num-cpus", str(NODE_CPUS)),
            *("--object-store-memory", str(self.object_store_mb * 1_000_000)),
            *("--resources", resources),
            # Ray opens the folder that it is given to all users, so it has one inside.
            *("--temp-dir", str(self.temp / "ray")),
            *("--include-log-monitor", "false", "--disable-usage-stats", "--log-color", "false", "--block"),
        ]

    def program(self, name: str) -> Program:
        """Return the node as a program that a machine runs."""
        listening = self.services["node-manager-port"] if self.head else self.first_port
        return Program(
            name=name,
            command=self.command(),
            answers=lambda: listens(self.host, listening),
            again_s=_SLOW_S,
            # Ray's advice holds for other clusters than these.
            log=self.temp / "ray.log",
        )


@dataclass(frozen=True, kw_only=True)
class ClusterBox:
    """Machine of a cluster: options that a control unit and a device share."""

    host: str
    """Address of this machine that the others of the cluster reach."""
    certs: DeviceFiles
    state: Path
    """Folder of what survives a restart."""
    devices: Sequence[int] = ()
    """Numbers of the devices that this machine is, within its cluster."""
    ray_port: int = FIRST_PORT
    object_store_mb: int = 512
    until: Callable[[], str] = lambda: ""
    """Reason to end the programs; empty as long as there is none."""

    @property
    def head(self) -> str:
        """``host:port`` of the control unit's Ray; empty: this machine has it."""
        return ""

    def ray_node(self, temp: Path) -> RayNode:
        """Return the machine's node of its cluster's Ray."""
        return RayNode(
            host=self.host,
            head=self.head,
            devices=self.devices,
            first_port=self.ray_port,
            object_store_mb=self.object_store_mb,
            temp=temp,
        )


def run_node(
    programs: Sequence[Program],
    environment: Mapping[str, str],
    work: Path,
    temp: Path,
    say: Callable[[str], None],
    until: Callable[[], str] = lambda: "",
) -> int:
    """Run programs of which one is a node in ``temp``; its logs stay if something went wrong."""
    code = 1
    try:
        code = run_programs(programs, environment, work, say, until)
    finally:
        if code:
            say(f"logs of Ray: {temp}")
        else:
            shutil.rmtree(temp, ignore_errors=True)
    return code


def ray_environment(environment: Mapping[str, str], token: Path, tls: NodeTls | None = None) -> dict[str, str]:
    """Add the secret of the cluster's Ray, and the certificate that encrypts its connections."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.resolve())}
    return {**RAY_SETTINGS, **without_secrets(environment), **secret, **(tls.environment() if tls else {})}


@contextlib.contextmanager
def ray_access(address: str, certs: Path | None) -> Iterator[None]:
    """Prepare this process, which has not imported Ray, for the Ray that it starts or speaks to.

    Parameters
    ----------
    address : ``host:port`` of a cluster's Ray; empty: a private one of this process
    certs : this machine's folder of a deployment, with the cluster's secret; None: the cluster has none
    """
    if not address:
        prepare_private_ray()
    with contextlib.ExitStack() as access:
        if certs is not None and ":" in address:
            # The control unit's own machine measures: its Ray is the head.
            host = split_address("--address", address).bare_host
            access.enter_context(cluster_access(DeviceFiles(certs), host))
        yield


@contextlib.contextmanager
def cluster_access(files: DeviceFiles, host: str) -> Iterator[None]:
    """Let this process speak to a cluster's Ray, which it has not imported yet."""
    files.check()
    previous_environment = dict(os.environ)
    try:
        environment = ray_environment(os.environ, files.ray_token, node_tls(files, host))
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous_environment)


def node_tls(files: DeviceFiles, host: str) -> NodeTls | None:
    """Return a machine's certificate within its cluster; None on the loopback, where nobody else can listen.

    Ray replaces the loopback's address by the machine's outer one, for which the certificate would not be.
    """
    if is_loopback(host):
        return None
    return NodeTls(certificate=files.node_certificate, key=files.key, authority=files.cluster_ca, host=host.strip("[]"))
