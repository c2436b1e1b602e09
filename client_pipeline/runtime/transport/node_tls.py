"""TLS between the machines of one cluster: the certificate of this machine's Ray node, for its tensors, too.

Ray reads the files from the environment of ``ray start`` and hands it on to every process of the node. All show a
certificate at both ends of a connection, and trust the cluster's own authority alone.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SWITCH, _CERTIFICATE = "RAY_USE_TLS", "RAY_TLS_SERVER_CERT"
_KEY, _AUTHORITY = "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
_HOST = "COLLAPIPE_NODE_HOST"
TLS_VARIABLES = (_SWITCH, _CERTIFICATE, _KEY, _AUTHORITY, _HOST)
"""Variables that name these files to the processes of a node; the last one is not Ray's."""


@dataclass(frozen=True, kw_only=True)
class NodeTls:
    """Files (PEM) of one machine of a cluster."""

    certificate: Path
    """Certificate for the address at which the others of the cluster reach this machine."""
    key: Path
    authority: Path
    """Certificate of the cluster's authority."""
    host: str = ""
    """The address that the certificate is for; empty: the one at which the control unit is reached from here."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> NodeTls | None:
        """Read the files from Ray's variables; None without them, as in a simulation.

        Raises
        ------
        ValueError
            If a file is not named.
        """
        if environment.get(_SWITCH, "0").lower() not in ("1", "true"):
            return None
        missing = [name for name in TLS_VARIABLES if name != _HOST and not environment.get(name)]
        if missing:
            raise ValueError(f"{_SWITCH} is set, and {', '.join(missing)} is not: name the file, or unset {_SWITCH}")
        return cls(
            certificate=Path(environment[_CERTIFICATE]),
            key=Path(environment[_KEY]),
            authority=Path(environment[_AUTHORITY]),
            host=environment.get(_HOST, ""),
        )

    def environment(self) -> dict[str, str]:
        """Variables of ``ray start``, and of all that speaks to this Ray."""
        files = {_CERTIFICATE: self.certificate, _KEY: self.key, _AUTHORITY: self.authority}
        return {_SWITCH: "1", _HOST: self.host} | {name: str(path.resolve()) for name, path in files.items()}

    def server_context(self) -> ssl.SSLContext:
        """Make the context of a listener, which takes only callers that the cluster's authority has signed."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # No caller comes back to a session, and a caller that only writes would never read the ticket.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """Make the context of a caller, which takes only the machine whose address was called."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context
