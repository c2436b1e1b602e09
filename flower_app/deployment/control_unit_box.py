"""Control unit of a deployment: the head of its cluster's Ray, the SuperNode, and its proxy to the server."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from client_pipeline import durable
from client_pipeline.link.hosts import HostPort, check_ipv4_host, check_reached_host, is_loopback, split_address
from flower_app.deployment.app_digest import installed_digest
from flower_app.deployment.app_proxy import ProxyFiles, write_credentials
from flower_app.deployment.certificate_checks import check_certificate, check_cluster_certificate
from flower_app.deployment.credentials import CuFiles
from flower_app.deployment.edge_server import SUPERLINK_PORT, TASK_POLL
from flower_app.deployment.findings import refuse_failed
from flower_app.deployment.machine_checks import NeededPort, refuse_taken_ports
from flower_app.deployment.metrics_door import metrics_address, metrics_ports, open_metrics
from flower_app.deployment.programs import Program, listens
from flower_app.deployment.ray_node import ClusterBox, node_tls, ray_environment, run_node
from flower_app.deployment.sole_start import sole_start
from flower_app.launch.inherited_environment import past_proxies
from flower_app.launch.processes import MARK
from flower_app.launch.superlink import flower_environment, program_path
from flower_app.node.door_folder import DoorFolder
from flower_app.serving.box_door import BoxDoor
from flower_app.serving.door_key import KEY_FILE, door_key

if TYPE_CHECKING:
    from flower_app.node.config import NodeConfig

NO_DOOR = "off"
"""Value of ``--serve`` that closes the door of a box which had one."""
UNKNOWN_S = 180.0
"""Time for which a SuperNode is started again when the server refuses it [s]."""
RUNTIME_HOST, RUNTIME_PORT = "127.0.0.1", 9094
"""Address at which a SuperNode and its own processes speak, within the machine."""


@dataclass(frozen=True, kw_only=True)
class ControlUnitBox(ClusterBox):
    """Control unit of a cluster: options and programs."""

    cluster: int
    server: str
    """``host`` or ``host:port`` of the SuperLink."""
    certs: CuFiles
    data: str = ""
    """Folder of the cluster's text."""
    model: str = ""
    """Folder of the pretrained model."""
    device_profile: str = ""
    allowed_apps: Sequence[str] = ()
    """Digests of the apps that may run here beside that of this release."""
    allowed_modules: Sequence[str] = ()
    """Modules and packages whose classes a run's configuration may name."""
    runtime_port: int = RUNTIME_PORT
    metrics: str = ""
    """``PORT`` of the loopback, or ``HOST:PORT``, where Prometheus asks; empty: nowhere."""
    serve: str = ""
    """``PORT`` of the loopback, or ``HOST:PORT``, of the door to a trained model; empty or ``off``: none."""

    def __post_init__(self) -> None:
        if self.cluster < 0:
            raise ValueError(f"--cluster: expected a number from 0, found {self.cluster}")
        for digest in self.allowed_apps:
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ValueError(f"--allow-app: expected a digest of 64 hexadecimal digits, found {digest!r}")
        for module in self.allowed_modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"--allow-module: expected the name of a module or package, found {module!r}")
        check_reached_host("--host", self.host)
        server_address(self.server)
        metrics_address(self.metrics)
        if (door := self._door_address) and not _is_address(door.bare_host):
            raise ValueError(
                f"--serve: expected PORT, or HOST:PORT with an address of this machine, found {self.serve!r}"
            )

    @property
    def _door_address(self) -> HostPort | None:
        return metrics_address("" if self.serve == NO_DOOR else self.serve, "--serve")

    @property
    def _door_folder(self) -> Path:
        return self.state.resolve() / "door"

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
        """Return the SuperNode's own configuration."""
        # Not above: this program stays in memory as long as the machine runs, and needs no torch.
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
            door=str(self._door_folder) if self._door_address else "",
            modules=",".join(self.allowed_modules),
        )

    def proxy_command(self, address: str, files: ProxyFiles, release: str) -> list[str]:
        """Return the proxy's command line."""
        return [
            *(sys.executable, "-P", "-m", "flower_app.deployment.app_proxy", address),
            *(str(server_address(self.server)), str(self.certs.ca.resolve()), str(files.folder)),
            *(release, *self.allowed_apps),
        ]

    def supernode_command(self, proxy: str, files: ProxyFiles) -> list[str]:
        """Return the SuperNode's command line."""
        return [
            str(program_path("flower-supernode")),
            *("--superlink", proxy, "--root-certificates", str(files.authority)),
            *("--trusted-entities", str(files.trusted)),
            *("--auth-supernode-private-key", str(self.certs.supernode_key.resolve())),
            *("--node-config", self.node_config().text()),
            *("--host", RUNTIME_HOST, "--port", str(self.runtime_port)),
        ]

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        self.check_paths()
        refuse_failed("--state", check_certificate(self.certs))
        refuse_failed("--state", check_cluster_certificate(self.certs))
        tls = node_tls(self.certs, self.host)
        with_ray = ray_environment(flower_environment(self.state.resolve() / "flower"), self.certs.ray_token, tls)
        environment = past_proxies(with_ray, self.host, server_address(self.server).host)
        with sole_start(self.state, environment[MARK], say) as temp_folder:
            refuse_taken_ports(
                [
                    *self.ray_node(temp_folder).needed_ports(),
                    NeededPort("--runtime-port", RUNTIME_HOST, self.runtime_port, "of the SuperNode's own processes"),
                    *metrics_ports(metrics_address(self.metrics), has_certificate=tls is not None),
                    *metrics_ports(self._door_address, tls is not None, "--serve", "of the door"),
                ]
            )
            work = self.state.resolve() / "work"
            certificate = None if tls is None else (tls.certificate, tls.key)

            def metrics() -> Callable[[], str]:
                from flower_app.watch.control_unit_metrics import control_unit_metrics

                return partial(control_unit_metrics, self._checkpoints, self.cluster)

            with open_metrics(self.metrics, metrics, self.state, certificate, say):
                programs = self._programs(temp_folder, environment)
                if not self._door_address:
                    # A door that is opened again later does not open with the model of this time.
                    DoorFolder(self._door_folder).withdraw()
                else:
                    programs.append(self._door_program(self._door_address, certificate, say))
                return run_node(programs, environment, work, temp_folder, say, self.until)

    def _door_program(
        self, address: HostPort, certificate: tuple[Path, Path] | None, say: Callable[[str], None]
    ) -> Program:
        """Draw the door's key, if it has none, and return the door's program."""
        # The program runs in another folder.
        tls = (
            None
            if certificate is None or is_loopback(address.host)
            else (certificate[0].resolve(), certificate[1].resolve())
        )
        folder = durable.make_folders(self._door_folder)
        key, _ = door_key(folder, new=False)
        scheme = "http" if tls is None else "https"
        say(f"door: {scheme}://{address}, open as soon as the server gives a model: collapipe serve RUN --superlink")
        say(
            f"key of the door: {key}  (it is not shown again)"
            if key
            else f"key of the door: that of {folder / KEY_FILE}"
        )
        door = BoxDoor(
            folder=folder,
            cluster=self.cluster,
            ray_address=f"{self.host}:{self.ray_port}",
            host=self.host,
            address=str(address),
            tls=tls,
        )
        # It ends with each model, and whatever ends it costs the box nothing else.
        return Program(name=f"door of cluster {self.cluster}", command=door.command(), again_s=math.inf)

    def _programs(self, temp_folder: Path, environment: Mapping[str, str]) -> list[Program]:
        ray = self.ray_node(temp_folder).program(f"Ray of cluster {self.cluster} at {self.host}:{self.ray_port}")
        files = write_credentials(temp_folder / "proxy", RUNTIME_HOST)
        with socket.socket() as probe:
            probe.bind((RUNTIME_HOST, 0))
            port = int(probe.getsockname()[1])
        address = f"{RUNTIME_HOST}:{port}"
        proxy = Program(
            name=f"proxy to {server_address(self.server)}",
            command=self.proxy_command(address, files, installed_digest()),
            answers=lambda: listens(RUNTIME_HOST, port),
        )
        supernode = Program(
            name=f"SuperNode of cluster {self.cluster}",
            command=self.supernode_command(address, files),
            # A SuperNode ends if the server does not know its key yet, or counts its predecessor as connected.
            again_s=UNKNOWN_S,
            # Linear algebra starts its threads when it is imported; messages are only passed on.
            environment={name: environment.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
            | TASK_POLL,
        )
        return [ray, proxy, supernode]


def server_address(server: str) -> HostPort:
    """Read the address of the SuperLink; the port is its default where none is given."""
    check_ipv4_host("--server", server if server.count(":") > 1 else server.partition(":")[0])
    return split_address("--server", server, SUPERLINK_PORT)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
