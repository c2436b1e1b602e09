"""One machine's node of its cluster's Ray: the command that starts it, and the ports that it takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import is_loopback
from client_pipeline.runtime.node_tls import NodeTls
from client_pipeline.runtime.private_ray import read_settings, without_secrets
from client_pipeline.system.devices import device_resource
from flower_app.deployment.cluster_authority import forget_node_key, node_tls
from flower_app.deployment.credentials import ClusterFiles
from flower_app.deployment.programs import Program, run_programs
from flower_app.deployment.taken_ports import NeededPort
from flower_app.launch.ray_folders import short_folder

FIRST_PORT = 6379
SLOW_S = 300.0
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
_WORKERS = 20


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """What ``ray start`` is told."""

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
    """Sockets and logs; a short path, for the names of sockets have 107 characters at most."""

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
        head_services = {} if self.head else {"port": self.first_port}
        return head_services | {name: self.first_port + 1 + i for i, name in enumerate(_SERVICES)}

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
            *(sys.executable, "-P", "-m", "client_pipeline.runtime.ray_program"),
            "start",
            *head_options,
            *ports,
            *("--min-worker-port", str(self.first_port + _WORKERS)),
            *("--max-worker-port", str(self.first_port + PORTS - 1)),
            *("--node-ip-address", self.host),
            # Actors of ours ask for places, not for processors.
            *("--num-cpus", "1"),
            *("--object-store-memory", str(self.object_store_mb * 1_000_000)),
            *("--resources", resources),
            *("--temp-dir", str(self.temp)),
            *("--include-log-monitor", "false", "--disable-usage-stats", "--log-color", "false", "--block"),
        ]


def ray_folder() -> Path:
    """A new folder for a node's sockets and logs."""
    return Path(tempfile.mkdtemp(prefix="collapipe-", dir=short_folder()))


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
        code = run_programs(programs, environment, work, say, [temp], until)
    finally:
        forget_node_key(temp)
        if code:
            say(f"logs of Ray: {temp}")
        else:
            shutil.rmtree(temp, ignore_errors=True)
    return code


def ray_environment(environment: Mapping[str, str], token: Path, tls: NodeTls | None = None) -> dict[str, str]:
    """Add the secret without which no process may speak to the cluster's Ray, and how it is encrypted."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.resolve())}
    return {**without_secrets(environment), **secret, **(tls.environment() if tls else {})}


@contextlib.contextmanager
def cluster_access(files: ClusterFiles, host: str) -> Iterator[None]:
    """Let this process speak to a cluster's Ray.

    Parameters
    ----------
    files : the machine's folder
    host : address of this machine that the cluster's others reach
    """
    files.check()
    previous_environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="collapipe-tls-") as temp:
        try:
            os.environ.update(ray_environment({}, files.ray_token, own_tls(files, host, Path(temp))))
            read_settings()
            yield
        finally:
            os.environ.clear()
            os.environ.update(previous_environment)
            read_settings()


def own_tls(files: ClusterFiles, host: str, temp: Path) -> NodeTls | None:
    """A machine's certificate, as :func:`node_tls` has it; None on the loopback, where nobody else can listen.

    Ray puts the machine's outer address in the loopback's place, for which the certificate would not be.
    """
    return None if is_loopback(host) else node_tls(files, host, temp)


def tell_plain_text(files: ClusterFiles, say: Callable[[str], None]) -> None:
    """Warn of a cluster whose machines cannot encrypt."""
    if not files.cluster_ca.is_file():
        say(
            f"warning: no {files.cluster_ca}: within the cluster everything travels in plain text; collapipe certs "
            "makes what is missing, for all machines of the cluster"
        )


def past_proxies(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """No proxy for the outer world stands between the machines of a deployment."""
    return {**environment, **{name: ",".join((environment[name], *hosts)) for name in ("no_proxy", "NO_PROXY")}}
