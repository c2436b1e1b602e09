"""``collapipe up device``: a node of its cluster's Ray that says which device it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import HostPort, is_loopback, split_address
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.head_check import HeadWatch, wait_for_head
from flower_app.deployment.programs import Program, listens, wait_until_listens
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
from flower_app.deployment.taken_ports import refuse_taken_ports
from flower_app.launch.superlink import flower_environment


@dataclass(frozen=True, kw_only=True)
class DeviceBox:
    """Options of ``collapipe up device``."""

    devices: Sequence[int]
    """Numbers of the devices that this machine is, within its cluster."""
    host: str
    """Address of this machine that the others of the cluster reach."""
    cu: str
    """``host`` or ``host:port`` of the control unit's Ray."""
    certs: DeviceFiles
    wait: float = 60.0
    """How long the control unit may take to come up [s]."""
    ray_port: int = FIRST_PORT
    object_store_mb: int = 512
    until: Callable[[], str] = lambda: ""
    """Why its programs have to end; empty as long as they go on."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("--device: expected the number of the device within its cluster, found none")
        cu_address(self.cu)
        # A gloo member on the loopback listens where a control unit on the network cannot hear it.
        if is_loopback(self.host) != is_loopback(cu_address(self.cu).host):
            raise ValueError(
                f"--host: expected the address of this machine that {self.cu} reaches, found {self.host}; a loopback "
                "address and another one cannot reach each other"
            )

    def ray_node(self, temp: Path) -> RayNode:
        """The machine's node of its cluster's Ray."""
        return RayNode(
            host=self.host,
            head=str(cu_address(self.cu)),
            devices=self.devices,
            first_port=self.ray_port,
            object_store_mb=self.object_store_mb,
            temp=temp,
        )

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        head = cu_address(self.cu)
        refuse_taken_ports(self.ray_node(Path()).needed_ports())
        wait_until_listens(head.host, head.port, self.wait, "start the control unit first: collapipe up cu")
        temp_folder = ray_folder()
        node = self.ray_node(temp_folder)
        try:
            tls = own_tls(self.certs, self.host, temp_folder)
            tell_plain_text(self.certs, say)
            wait_for_head(head, tls, self.wait, say)
        except (OSError, ValueError):
            shutil.rmtree(temp_folder, ignore_errors=True)
            raise
        with_ray = ray_environment(flower_environment(temp_folder / "flower"), self.certs.ray_token, tls)
        name = f"device {', '.join(map(str, self.devices))} of {head}"
        listening = node.services["node-manager-port"]
        watch = HeadWatch(head, tls)
        ray = Program(
            name=name,
            command=node.command(),
            answers=lambda: listens(self.host, listening),
            again_s=SLOW_S,
            # Else a machine whose Ray has found the new head by itself would be ended for it.
            before_again=watch.forget,
        )
        environment = past_proxies(with_ray, self.host, head.host)
        return run_node(
            [ray], environment, temp_folder / "work", temp_folder, say, lambda: self.until() or watch.reason()
        )


def cu_address(cu: str) -> HostPort:
    """The address of a control unit's Ray, the port being ours where none is given."""
    return split_address("--cu", cu, FIRST_PORT)
