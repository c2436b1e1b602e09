"""``collapipe up edge-server``: the SuperLink on the loopback, its proxy, and the SuperNodes that may connect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import check_ipv4_host, split_address
from flower_app.deployment.certificate_checks import check_certificate
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.findings import refuse_failed
from flower_app.deployment.machine_checks import NeededPort, refuse_taken_ports
from flower_app.deployment.metrics_door import metrics_address, metrics_ports, open_metrics
from flower_app.deployment.programs import Program, run_programs
from flower_app.deployment.sole_start import sole_start
from flower_app.launch.inherited_environment import without_proxies
from flower_app.launch.processes import MARK
from flower_app.launch.superlink import flower_environment, is_healthy, program_path, write_connection

SUPERLINK_PORT = 9092
REPLY_MB = 4096
TASK_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Interval at which Flower's SuperExec asks for work [s]; its default is one second."""
CONTROL_HOST = "127.0.0.1"
"""Runs and the register of SuperNodes are controlled from the edge server's own machine."""
EDGE_CONNECTION = "edge-server"
_REGISTER_S = 120.0


@dataclass(frozen=True, kw_only=True)
class EdgeServer:
    """The command's options."""

    host: str
    """Address that the control units reach."""
    certs: ServerFiles
    state: Path
    """Folder of the SuperLink's database."""
    port: int = SUPERLINK_PORT
    """Port that the SuperNodes reach."""
    control_port: int = 0
    """Port on the loopback for runs and the register of SuperNodes; 0: the one after ``port``."""
    companions: Sequence[Program] = ()
    """Programs that run here once the SuperLink is up."""
    companion_ports: Sequence[NeededPort] = ()
    """Ports of the companions."""
    metrics: str = ""
    """``PORT`` of the loopback, or ``HOST:PORT``, where Prometheus asks; empty: nowhere."""
    runs: Path = Path("runs")
    """Folder of the runs; the metrics show the newest."""
    reply_mb: int = REPLY_MB
    """Most that a SuperNode may push for one order [MB]."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port: expected 1 to 65535, found {self.port}")
        check_ipv4_host("--host", self.host)
        control_address(self.port, self.control_port)
        metrics_address(self.metrics)
        if self.reply_mb < 1:
            raise ValueError(f"--reply-mb: expected at least 1, found {self.reply_mb}")

    @property
    def address(self) -> str:
        """``host:port`` that the SuperNodes reach."""
        return f"{self.host}:{self.port}"

    @property
    def control(self) -> str:
        """``host:port`` on this machine that runs are started at."""
        return control_address(self.port, self.control_port)

    def superlink_command(self) -> list[str]:
        """Return the SuperLink's command line."""
        return [
            str(program_path("flower-superlink")),
            *("--host", CONTROL_HOST, "--port", str(split_address("control", self.control).port)),
            *("--ssl-certfile", str(self.certs.certificate.resolve())),
            *("--ssl-keyfile", str(self.certs.key.resolve())),
            *("--ssl-ca-certfile", str(self.certs.ca.resolve())),
            "--enable-supernode-auth",
            *("--database", str((self.state / "superlink.db").resolve())),
        ]

    def proxy_command(self) -> list[str]:
        """Return the proxy's command line."""
        files = (self.certs.certificate, self.certs.key, self.certs.ca)
        return [
            *(sys.executable, "-P", "-m", "flower_app.deployment.fleet_proxy", self.address, self.control),
            *(str(path.resolve()) for path in files),
            str(self.reply_mb),
        ]

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        host, port = split_address("--host", self.address)
        control = split_address("control", self.control)
        refuse_failed("--certs", check_certificate(self.certs, self.host))
        home = self.state.resolve() / "flower"
        environment = flower_environment(home)
        superlink = Program(
            name=f"SuperLink for runs at {self.control}",
            command=self.superlink_command(),
            environment=TASK_POLL,
            answers=lambda: is_healthy(self.control, self.certs.ca),
            then=lambda: register_supernodes(self.control, self.certs, environment, say),
        )
        proxy = Program(
            name=f"SuperLink at {self.address}",
            command=self.proxy_command(),
            answers=lambda: is_healthy(self.address, self.certs.ca),
        )
        programs = [superlink, proxy, *self.companions]
        with sole_start(self.state, environment[MARK], say):
            refuse_taken_ports(
                [
                    NeededPort("--port", host, port, "for SuperNodes"),
                    NeededPort("--control-port", control.host, control.port, "for runs"),
                    *self.companion_ports,
                    *metrics_ports(metrics_address(self.metrics), has_certificate=True),
                ]
            )
            write_connection(home, EDGE_CONNECTION, self.control, self.certs.ca)

            def metrics() -> Callable[[], str]:
                from flower_app.watch.run_metrics import NewestRun

                return NewestRun(self.runs).text

            with open_metrics(self.metrics, metrics, self.state, (self.certs.certificate, self.certs.key), say):
                return run_programs(programs, environment, self.state.resolve() / "work", say)


def control_address(port: int, control_port: int = 0) -> str:
    """Return ``host:port`` of the SuperLink's control, on its own machine.

    Parameters
    ----------
    port : that the SuperNodes reach
    control_port : 0: the one after ``port``

    Raises
    ------
    ValueError
        If it is no port, or the SuperNodes' own.
    """
    chosen = control_port or port + 1
    if not 1 <= chosen <= 65535 or chosen == port:
        raise ValueError(f"--control-port: expected 1 to 65535 and not --port {port}, found {chosen}")
    return f"{CONTROL_HOST}:{chosen}"


def register_supernodes(
    control: str, certs: ServerFiles, environment: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Let the SuperNodes connect whose public keys are in the folder and not revoked, and nobody else.

    Raises
    ------
    ValueError
        If the SuperLink does not take a key.
    """
    if not list(certs.supernodes.glob("*.pub")):
        say(f"warning: no public key of a SuperNode in {certs.supernodes}: none may connect")
    program = [sys.executable, "-P", "-m", "flower_app.deployment.supernodes"]
    process = subprocess.run(
        [*program, control, str(certs.ca.resolve()), str(certs.folder.resolve())],
        env=without_proxies(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_REGISTER_S,
    )
    if process.returncode:
        raise ValueError(f"{certs.supernodes}: {process.stderr.strip() or f'exit code {process.returncode}'}")
    for line in process.stdout.splitlines():
        say(line)
