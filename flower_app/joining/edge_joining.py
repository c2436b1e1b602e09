"""``collapipe up edge-server --name HOST`` and ``collapipe invite``: an edge server that boxes can join by a code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import HostPort, split_address
from flower_app.deployment.authority import Authority, read_certificate, write_public
from flower_app.deployment.certs import CertsRequest, certificate_hosts, make_server_certificate, normal_host
from flower_app.deployment.programs import Program, listens
from flower_app.deployment.taken_ports import NeededPort
from flower_app.joining.join_code import JOIN_PORT, JoinCode
from flower_app.joining.join_folder import JoinFolder

CODE_MINUTES = 60.0
_MOST_CODES = 1_000


@dataclass(frozen=True, kw_only=True)
class EdgeJoining:
    """Options of ``collapipe up edge-server`` that are about joining."""

    name: str
    """Name or address that boxes reach the edge server at; in the codes and in its certificate."""
    root: Path
    """Folder of the authority, the server's own files, and the boxes that join."""
    join_port: int = JOIN_PORT
    auto_approve: bool = False
    """Approve whoever shows a good code."""

    def __post_init__(self) -> None:
        if not 1 <= self.join_port <= 65535:
            raise ValueError(f"--join-port: expected 1 to 65535, found {self.join_port}")

    @property
    def folder(self) -> JoinFolder:
        """What is kept of the boxes."""
        return JoinFolder(self.root)

    def prepare(self) -> None:
        """Make an authority and the server's certificate, as far as they are not there.

        Raises
        ------
        ValueError
            If ``name`` is none, or the certificate that is there is for others.
        """
        certificate = self.folder.server.certificate
        if certificate.is_file() and normal_host(self.name) in certificate_hosts(read_certificate(certificate)):
            Authority.load(self.folder.authority)
        else:
            make_server_certificate(CertsRequest(servers=[self.name], clusters=1, out=self.root))
        address = {"address": str(HostPort(_bracketed(self.name), self.join_port))}
        write_public(self._address_file, json.dumps(address).encode())

    @property
    def _address_file(self) -> Path:
        return self.folder.folder / "address.json"

    def needed_port(self, host: str) -> NeededPort:
        """Where the service listens."""
        return NeededPort("--join-port", host, self.join_port, "for boxes that join")

    def programs(self, host: str, superlink_port: int, control: str) -> Sequence[Program]:
        """The service that boxes ask, and the registrar.

        Parameters
        ----------
        host : address that both listen at
        superlink_port : the SuperLink's, for SuperNodes
        control : ``host:port`` of the SuperLink's control
        """
        root, python = str(self.root.resolve()), (sys.executable, "-P", "-m")
        place = str(HostPort(_bracketed(host), self.join_port))
        return [
            Program(
                name=f"joining at {place}",
                command=(*python, "flower_app.joining.join_service", place, str(superlink_port), root),
                answers=lambda: listens(host, self.join_port),
            ),
            Program(
                name="registrar",
                command=(
                    *(*python, "flower_app.joining.registrar", control, root),
                    "approve" if self.auto_approve else "ask",
                ),
            ),
        ]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def invite(folder: JoinFolder, codes: int = 1, minutes: float = CODE_MINUTES) -> list[JoinCode]:
    """Make codes, each for one box.

    Parameters
    ----------
    folder : the edge server's
    codes : how many
    minutes : how long a box may show one for the first time

    Raises
    ------
    FileNotFoundError, ValueError
        If no box can join here, or for a number that is none.
    """
    if not 1 <= codes <= _MOST_CODES:
        raise ValueError(f"--codes: expected 1 to {_MOST_CODES}, found {codes}")
    if not 0 < minutes <= 7 * 24 * 60:
        raise ValueError(f"--minutes: expected more than 0, and at most a week (10080), found {minutes:g}")
    folder.check()
    file = folder.folder / "address.json"
    address = split_address(str(file), json.loads(file.read_text(encoding="utf-8"))["address"])
    authority = read_certificate(folder.authority.certificate)
    made = [JoinCode.new(address, authority) for _ in range(codes)]
    for code in made:
        folder.invite(code, minutes)
    return made


def tell_codes(codes: Sequence[JoinCode], minutes: float, say: Callable[[str], None]) -> None:
    """Say what to do with codes."""
    say(f"boxes join within {minutes:g} minutes by these codes; each is for one box, and a secret until it is used:")
    for code in codes:
        say(f"  collapipe join {code}")
    say("with --data FOLDER on a control unit, with --cluster 0 on a device of cluster 0")
