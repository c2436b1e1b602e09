"""``collapipe up cu``: the head of a cluster's Ray, and the SuperNode."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from client_pipeline.link.hosts import HostPort, is_loopback, split_address
from flower_app.deployment.credentials import CuFiles
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.metrics_door import metrics_address, metrics_ports, metrics_token
from flower_app.deployment.programs import Program, listens
from flower_app.deployment.ray_node import (
    FIRST_PORT,
    SLOW_S,
    RayNode,
    own_tls,
    past_proxies,
    ray_environment,
    ray_folder,
    run_node,
    tell_plain_text,
)
from flower_app.deployment.taken_ports import NeededPort, refuse_taken_ports
from flower_app.launch.superlink import flower_environment

if TYPE_CHECKING:
    from client_pipeline.runtime.node_tls import NodeTls
    from flower_app.node.config import NodeConfig

UNKNOWN_S = 180.0
"""How long a SuperNode may be refused until its control unit gives up [s]."""
RUNTIME_HOST, RUNTIME_PORT = "127.0.0.1", 9094
"""On which a SuperNode and its own processes speak, within the machine."""


@dataclass(frozen=True, kw_only=True)
class ControlUnitBox:
    """Options of ``collapipe up cu``."""

    cluster: int
    host: str
    """Address that the devices of the cluster reach."""
    server: str
    """``host`` or ``host:port`` of the SuperLink."""
    certs: CuFiles
    state: Path
    """Folder of checkpoints, and of the app that the server sends."""
    data: str = ""
    """Folder of the cluster's text."""
    model: str = ""
    """Folder of the pretrained model."""
    device_profile: str = ""
    devices: Sequence[int] = ()
    """Devices that this machine itself is."""
    allowed_apps: Sequence[str] = ()
    """Digests of the apps that may run here beside that of this release."""
    allowed_modules: Sequence[str] = ()
    """Modules and packages whose classes a run's configuration may name."""
    ray_port: int = FIRST_PORT
    runtime_port: int = RUNTIME_PORT
    object_store_mb: int = 512
    metrics: str = ""
    """``PORT`` of the loopback, or ``HOST:PORT``, where Prometheus asks; empty: nowhere."""
    until: Callable[[], str] = lambda: ""
    """Why its programs have to end; empty as long as they go on."""

    def __post_init__(self) -> None:
        if self.cluster < 0:
            raise ValueError(f"--cluster: expected a number from 0, found {self.cluster}")
        for digest in self.allowed_apps:
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ValueError(f"--allow-app: expected a digest of 64 hexadecimal digits, found {digest!r}")
        for module in self.allowed_modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"--allow-module: expected the name of a module or package, found {module!r}")
        server_address(self.server)
        metrics_address(self.metrics)

    @property
    def _checkpoints(self) -> Path:
        return self.state / "checkpoints"

    def check_paths(self) -> None:
        """Raise ``FileNotFoundError`` for a folder or file that is not there."""
        if self.data and not Path(self.data).is_dir():
            raise FileNotFoundError(f"--data: no folder {self.data}; name the one that holds the cluster's text")
        if self.model and not Path(self.model).is_dir():
            raise FileNotFoundError(f"--model: no folder {self.model}; name the one that holds the pretrained model")
        if self.device_profile and not Path(self.device_profile).is_file():
            raise FileNotFoundError(f"--device-profile: no file {self.device_profile}; collapipe profile writes one")

    def node_config(self) -> NodeConfig:
        """What the SuperNode is told about itself."""
        # Not above: what stays in memory as long as the machine runs should not hold torch.
        from flower_app.node.config import NodeConfig

        return NodeConfig(
            cluster=self.cluster,
            data_path=_absolute(self.data),
            model_path=_absolute(self.model),
            device_profile=_absolute(self.device_profile),
            state_dir=str(self._checkpoints.resolve()),
            tls_certificate=str(self.certs.certificate.resolve()),
            tls_key=str(self.certs.key.resolve()),
            tls_ca=str(self.certs.ca.resolve()),
            ray_address=f"{self.host}:{self.ray_port}",
            host=self.host,
            modules=",".join(self.allowed_modules),
        )

    def ray_node(self, temp: Path) -> RayNode:
        """The head of the cluster's Ray."""
        return RayNode(
            host=self.host,
            devices=self.devices,
            first_port=self.ray_port,
            object_store_mb=self.object_store_mb,
            temp=temp,
        )

    def supernode_command(self) -> list[str]:
        """The SuperNode's command line."""
        return [
            *(sys.executable, "-P", "-m", "flower_app.deployment.supernode_program", ",".join(self.allowed_apps)),
            *("--superlink", str(server_address(self.server))),
            *("--root-certificates", str(self.certs.ca.resolve())),
            *("--auth-supernode-private-key", str(self.certs.supernode_key.resolve())),
            *("--node-config", self.node_config().text()),
            *("--host", RUNTIME_HOST, "--port", str(self.runtime_port)),
        ]

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        self.check_paths()
        has_certificate = self.certs.cluster_ca.is_file() and not is_loopback(self.host)
        refuse_taken_ports(
            [
                *self.ray_node(Path()).needed_ports(),
                NeededPort("--runtime-port", RUNTIME_HOST, self.runtime_port, "of the SuperNode's own processes"),
                *metrics_ports(metrics_address(self.metrics), has_certificate),
            ]
        )
        temp_folder = ray_folder()
        tls = own_tls(self.certs, self.host, temp_folder)
        tell_plain_text(self.certs, say)
        with_ray = ray_environment(flower_environment(self.state.resolve() / "flower"), self.certs.ray_token, tls)
        environment = past_proxies(with_ray, self.host, server_address(self.server).host)
        ray = Program(
            name=f"Ray of cluster {self.cluster} at {self.host}:{self.ray_port}",
            command=self.ray_node(temp_folder).command(),
            answers=lambda: listens(self.host, self.ray_port),
            again_s=SLOW_S,
        )
        supernode = Program(
            name=f"SuperNode of cluster {self.cluster}",
            command=self.supernode_command(),
            # It gives up if the server does not know its key yet.
            again_s=UNKNOWN_S,
            # Linear algebra starts its threads when it is imported; messages are only passed on.
            environment={name: environment.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
        )
        work = self.state.resolve() / "work"
        with self._metrics(tls, say):
            return run_node([ray, supernode], environment, work, temp_folder, say, self.until)

    def _metrics(self, tls: NodeTls | None, say: Callable[[str], None]) -> AbstractContextManager[None]:
        if (address := metrics_address(self.metrics)) is None:
            return nullcontext()
        # Not above: most control units serve none, and these stay in memory as long as the machine runs.
        from flower_app.watch.control_unit_metrics import ControlUnitMetrics
        from flower_app.watch.metrics_server import served_metrics
        from flower_app.watch.serving import ServerCertificate

        certificate = None if tls is None else ServerCertificate(tls.certificate, tls.key)
        metrics = ControlUnitMetrics(self._checkpoints, self.cluster)
        return served_metrics(address, metrics.text, metrics_token(self.state), certificate, say)


def server_address(server: str) -> HostPort:
    """The address of the SuperLink, the port being ours where none is given."""
    return split_address("--server", server, SUPERLINK_PORT)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""
