"""Edge server that boxes can join by a code: its authority and certificate, its programs, its codes."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline.link.hosts import HostPort, check_reached_host
from flower_app.deployment import revocation
from flower_app.deployment.certificate_authority import (
    CERTIFICATE_DAYS,
    Authority,
    certificate_hosts,
    normal_host,
    read_certificate,
    write_public,
    write_secret,
)
from flower_app.deployment.certificate_checks import SOON_DAYS
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.programs import Program, listens
from flower_app.joining.join_code import JOIN_PORT, LIFETIME_MINUTES, JoinCode, check_invitation
from flower_app.joining.join_folder import JoinFolder
from flower_app.runs.run_lock import check_own_folder


@dataclass(frozen=True, kw_only=True)
class EdgeJoining:
    """Options of ``collapipe up edge-server`` that are about joining."""

    name: str
    """Name or address at which boxes reach the edge server; in the codes and in its certificate."""
    root: Path
    """Folder of the authority, the edge server's files, and the joining boxes."""
    join_port: int = JOIN_PORT
    superlink_port: int = SUPERLINK_PORT
    auto_approve: bool = False
    """Approve every box that shows a good code."""

    def __post_init__(self) -> None:
        if not 1 <= self.join_port <= 65535:
            raise ValueError(f"--join-port: expected 1 to 65535, found {self.join_port}")
        check_reached_host("--name", self.name)

    @property
    def folder(self) -> JoinFolder:
        """Record of the boxes."""
        return JoinFolder(self.root)

    def prepare(self, host: str = "") -> None:
        """Make what is missing: the authority, and a certificate of the edge server that is valid for its hosts.

        A certificate that is about to expire is replaced.

        Parameters
        ----------
        host : address at which the programs listen, where it is not ``name``

        Raises
        ------
        FileNotFoundError, ValueError
            If the authority is not complete, or has expired.
        """
        if self.root.is_dir():
            check_own_folder(self.root.resolve())
        signer, server = self.folder.authority, self.folder.server
        # A key alone is what a first start that was cut has left: nothing was signed by it.
        if signer.certificate.is_file() or server.ca.is_file():
            authority = Authority.load(signer)
        else:
            authority = Authority.create()
            authority.save(signer)
        hosts, covered, is_old = list(dict.fromkeys(filter(None, (self.name, host)))), [], True
        if server.certificate.is_file() and server.key.is_file():
            present = read_certificate(server.certificate)
            covered = certificate_hosts(present)
            soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=SOON_DAYS)
            is_old = present.not_valid_after_utc < soon
        if is_old or not all(normal_host(each) in covered for each in hosts):
            # Boxes that joined by an earlier name still reach the server.
            earlier = [each for each in covered if each not in map(normal_host, hosts)]
            certificate, key = authority.issue_server([*hosts, *earlier], CERTIFICATE_DAYS)
            # The certificate last: beside another key it is still the old one, and replaced at the next start.
            write_secret(server.key, key)
            write_public(server.certificate, certificate)
        write_public(server.ca, authority.pem)
        revocation.publish(authority, signer, server)
        self.folder.note_address(HostPort(_bracketed(self.name), self.join_port), self.superlink_port)

    def programs(self, host: str, control: str, then: Callable[[], None] = lambda: None) -> Sequence[Program]:
        """Return the joining service and the registrar."""
        root, python = str(self.root.resolve()), (sys.executable, "-P", "-m")
        how = "approve" if self.auto_approve else "ask"
        place = str(HostPort(_bracketed(host), self.join_port))
        return [
            Program(
                name=f"joining at {place}",
                command=(*python, "flower_app.joining.join_service", place, root, how),
                answers=lambda: listens(host, self.join_port),
                then=then,
            ),
            Program(
                name="registrar",
                command=(*python, "flower_app.joining.registrar", control, root, how),
            ),
        ]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def invite(folder: JoinFolder, codes: int = 1, minutes: float = LIFETIME_MINUTES) -> list[JoinCode]:
    """Make codes, each for one box.

    Raises
    ------
    FileNotFoundError, ValueError
        If no box can join here, or a number is out of range.
    """
    check_invitation(codes, minutes)
    folder.check()
    address = folder.address()
    authority = read_certificate(folder.authority.certificate)
    made = [JoinCode.new(address, authority) for _ in range(codes)]
    for code in made:
        folder.invite(code, minutes)
    return made


def tell_codes(codes: Sequence[JoinCode], minutes: float, say: Callable[[str], None]) -> None:
    """Print codes, and the command that uses them."""
    unit, what = "minute" if minutes == 1 else "minutes", "this code; it" if len(codes) == 1 else "these codes; each"
    say(f"boxes join within {minutes:g} {unit} by {what} is for one box, and a secret until it is used:")
    for code in codes:
        say(f"  collapipe join {code}")
    say("with --data FOLDER on a control unit, with --cluster 0 on a device of cluster 0")
