"""``collapipe up edge-server``: the SuperLink, and who may connect to it."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.programs import Program, run_programs
from flower_app.superlink import flower_environment, program_path

SUPERLINK_PORT = 9092
CONNECTION = "edge-server"
_REGISTER_S = 120.0
_KNOWN = "already in use"


@dataclass(frozen=True, kw_only=True)
class EdgeServer:
    """The command's options."""

    host: str
    """Address that the control units reach."""
    certs: ServerFiles
    state: Path
    """Folder of the SuperLink's database."""
    port: int = SUPERLINK_PORT

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port: expected 1 to 65535, found {self.port}")

    @property
    def address(self) -> str:
        """``host:port`` of the SuperLink."""
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The SuperLink's command line."""
        return [
            str(program_path("flower-superlink")),
            *("--host", self.host, "--port", str(self.port)),
            *("--ssl-certfile", str(self.certs.certificate.resolve())),
            *("--ssl-keyfile", str(self.certs.key.resolve())),
            *("--ssl-ca-certfile", str(self.certs.ca.resolve())),
            "--enable-supernode-auth",
            *("--database", str((self.state / "superlink.db").resolve())),
        ]

    def up(self, say: Callable[[str], None]) -> int:
        """Run until told to end; returns the exit code."""
        self.certs.check()
        home = self.state.resolve() / "flower"
        write_connection(home, self.address, self.certs.ca)
        environment = flower_environment(home)
        superlink = Program(
            name=f"SuperLink at {self.address}",
            command=self.command(),
            answers=lambda: is_healthy(self.address, self.certs.ca),
            then=lambda: register_supernodes(self.certs, environment, say),
        )
        return run_programs([superlink], environment, self.state.resolve() / "work", say)


def write_connection(home: Path, address: str, ca: Path) -> None:
    """Tell Flower's commands where the SuperLink is."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f'[superlink.{CONNECTION}]\naddress = "{address}"\nroot-certificates = "{ca.resolve()}"\n',
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


def register_supernodes(certs: ServerFiles, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Let the SuperLink know the SuperNodes whose public keys are in the folder; those that it knows stay."""
    keys = sorted(certs.supernodes.glob("*.pub"))
    if not keys:
        say(f"warning: no public key of a SuperNode in {certs.supernodes}: none may connect")
    for key in keys:
        command = [str(program_path("flwr")), "supernode", "register", str(key.resolve()), CONNECTION]
        done = subprocess.run(
            [*command, "--name", key.stem, "--format", "json"],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_REGISTER_S,
        )
        if succeeded(done.stdout):
            say(f"{key.stem} may connect")
        elif _KNOWN in (done.stdout + done.stderr).lower():
            say(f"{key.stem} may connect, as before")
        else:
            raise ValueError(f"{key}: the SuperLink did not take it: {(done.stdout + done.stderr).strip()}")


def succeeded(output: str) -> bool:
    """Whether a command of Flower's with ``--format json`` says that it succeeded."""
    try:
        return bool(json.loads(output[output.index("{") :]).get("success"))
    except ValueError:
        return False
