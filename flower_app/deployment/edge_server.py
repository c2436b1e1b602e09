"""``collapipe up edge-server``: the SuperLink, and who may connect to it."""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import split_address
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.metrics_door import metrics_address, metrics_ports, metrics_token
from flower_app.deployment.programs import Program, run_programs
from flower_app.deployment.taken_ports import NeededPort, refuse_taken_ports
from flower_app.launch.superlink import flower_environment

SUPERLINK_PORT = 9092
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
    """That the SuperNodes reach."""
    control_port: int = 0
    """On the loopback, for runs and the register of SuperNodes; 0: the one after ``port``."""
    companions: Sequence[Program] = ()
    """What else runs here once the SuperLink is up."""
    companion_ports: Sequence[NeededPort] = ()
    """Where they listen."""
    metrics: str = ""
    """``PORT`` of the loopback, or ``HOST:PORT``, where Prometheus asks; empty: nowhere."""
    runs: Path = Path("runs")
    """Folder of the runs, the newest of which the metrics are of."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port: expected 1 to 65535, found {self.port}")
        control_address(self.port, self.control_port)
        metrics_address(self.metrics)

    @property
    def address(self) -> str:
        """``host:port`` that the SuperNodes reach."""
        return f"{self.host}:{self.port}"

    @property
    def control(self) -> str:
        """``host:port`` on this machine that runs are started at."""
        return control_address(self.port, self.control_port)

    def command(self) -> list[str]:
        """The SuperLink's command line."""
        return [
            *(sys.executable, "-P", "-m", "flower_app.deployment.superlink_program", self.address),
            *("--host", CONTROL_HOST, "--port", str(split_address("control", self.control).port)),
            *("--ssl-certfile", str(self.certs.certificate.resolve())),
            *("--ssl-keyfile", str(self.certs.key.resolve())),
            *("--ssl-ca-certfile", str(self.certs.ca.resolve())),
            "--enable-supernode-auth",
            *("--database", str((self.state / "superlink.db").resolve())),
        ]

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        host, port = split_address("--host", self.address)
        control = split_address("control", self.control)
        refuse_taken_ports(
            [
                NeededPort("--port", host, port, "for SuperNodes"),
                NeededPort("--control-port", control.host, control.port, "for runs"),
                *self.companion_ports,
                *metrics_ports(metrics_address(self.metrics), has_certificate=True),
            ]
        )
        home = self.state.resolve() / "flower"
        write_connection(home, self.control, self.certs.ca)
        environment = flower_environment(home)
        superlink = Program(
            name=f"SuperLink at {self.address}",
            command=self.command(),
            answers=lambda: is_healthy(self.address, self.certs.ca) and is_healthy(self.control, self.certs.ca),
            then=lambda: register_supernodes(self.control, self.certs, environment, say),
        )
        with self._metrics(say):
            return run_programs([superlink, *self.companions], environment, self.state.resolve() / "work", say)

    def _metrics(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        if (address := metrics_address(self.metrics)) is None:
            return nullcontext()
        # Not above: most edge servers serve none, and these stay in memory as long as the machine runs.
        from flower_app.watch.metrics_server import served_metrics
        from flower_app.watch.run_metrics import NewestRun
        from flower_app.watch.serving import ServerCertificate

        tls = ServerCertificate(self.certs.certificate, self.certs.key)
        return served_metrics(address, NewestRun(self.runs).text, metrics_token(self.state), tls, say)


def control_address(port: int, control_port: int = 0) -> str:
    """``host:port`` of the SuperLink's control, on its own machine.

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


def write_connection(home: Path, address: str, ca: Path) -> None:
    """Tell Flower's commands where the SuperLink is."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{EDGE_CONNECTION}"\n\n'
        f'[superlink.{EDGE_CONNECTION}]\naddress = "{address}"\nroot-certificates = "{ca.resolve()}"\n',
        encoding="utf-8",
    )


def opener_for(ca: Path) -> urllib.request.OpenerDirector:
    """Open HTTPS to a server whose certificate our authority signed, past any proxy for the outer world."""
    context = ssl.create_default_context(cafile=str(ca))
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def is_healthy(address: str, ca: Path) -> bool:
    """Whether the SuperLink answers."""
    try:
        with opener_for(ca).open(f"https://{address}/health", timeout=2.0):
            return True
    except (OSError, urllib.error.URLError):
        return False


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
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_REGISTER_S,
    )
    if process.returncode:
        raise ValueError(f"{certs.supernodes}: {process.stderr.strip() or f'exit code {process.returncode}'}")
    for line in process.stdout.splitlines():
        say(line)
