"""Device of a cluster: a node of its cluster's Ray that says which device it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from client_pipeline.link.hosts import HostPort, check_ipv4_host, check_reached_host, is_loopback, split_address
from flower_app.deployment.certificate_checks import check_cluster_certificate
from flower_app.deployment.findings import refuse_failed
from flower_app.deployment.head_check import wait_for_head
from flower_app.deployment.machine_checks import refuse_taken_ports
from flower_app.deployment.programs import wait_until_listens
from flower_app.deployment.ray_node import FIRST_PORT, ClusterBox, node_tls, ray_environment, run_node
from flower_app.deployment.sole_start import sole_start
from flower_app.launch.inherited_environment import past_proxies
from flower_app.launch.processes import MARK
from flower_app.launch.superlink import flower_environment

_CONTROL_UNIT_S = 300.0
"""Time for the control unit to come up; it may have been approved a moment ago [s]."""


@dataclass(frozen=True, kw_only=True)
class DeviceBox(ClusterBox):
    """Device of a cluster: options and programs."""

    cu: str
    """``host`` or ``host:port`` of the control unit's Ray."""
    wait: float = _CONTROL_UNIT_S
    """Time for the control unit to come up [s]."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("--device: expected the number of the device within its cluster, found none")
        check_reached_host("--host", self.host)
        # A gloo member on the loopback listens where a control unit on the network cannot hear it.
        if is_loopback(self.host) != is_loopback(cu_address(self.cu).host):
            raise ValueError(
                f"--host: expected the address of this machine that {self.cu} reaches, found {self.host}; a loopback "
                "address and another one cannot reach each other"
            )

    @property
    def head(self) -> str:
        """``host:port`` of the control unit's Ray."""
        return str(cu_address(self.cu))

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        head, tls = cu_address(self.cu), node_tls(self.certs, self.host)
        refuse_failed("--state", check_cluster_certificate(self.certs))
        environment = flower_environment(self.state.resolve() / "flower")
        with sole_start(self.state, environment[MARK], say) as temp_folder:
            node = self.ray_node(temp_folder)
            refuse_taken_ports(node.needed_ports())
            remedy = "start the control unit first: collapipe join --state FOLDER on its machine"
            wait_until_listens(head.host, head.port, self.wait, remedy)
            wait_for_head(head, tls, self.wait, say)
            ray = node.program(f"device {', '.join(map(str, self.devices))} of {head}")
            with_ray = past_proxies(ray_environment(environment, self.certs.ray_token, tls), self.host, head.host)
            return run_node([ray], with_ray, self.state.resolve() / "work", temp_folder, say, self.until)


def cu_address(cu: str) -> HostPort:
    """Read the address of a control unit's Ray; the port is Ray's first one where none is given."""
    check_ipv4_host("--cu", cu if cu.count(":") > 1 else cu.partition(":")[0])
    return split_address("--cu", cu, FIRST_PORT)
