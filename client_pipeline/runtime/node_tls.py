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
TLS_VARIABLES = (_SWITCH, _CERTIFICATE, _KEY, _AUTHORITY)
"""What Ray's processes learn these files from."""


@dataclass(frozen=True, kw_only=True)
class NodeTls:
    """Files (PEM) of one machine of a cluster."""

    certificate: Path
    """For the address at which the others of the cluster reach this machine."""
    key: Path
    authority: Path
    """Certificate of the cluster's authority."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> NodeTls | None:
        """What Ray was told; None where it was told nothing, as in a simulation.

        Raises
        ------
        ValueError
            If a file is not named.
        """
        if environment.get(_SWITCH, "0").lower() not in ("1", "true"):
            return None
        missing = [name for name in TLS_VARIABLES if not environment.get(name)]
        if missing:
            raise ValueError(f"{_SWITCH} is set, and {', '.join(missing)} is not: name the file, or unset {_SWITCH}")
        return cls(
            certificate=Path(environment[_CERTIFICATE]),
            key=Path(environment[_KEY]),
            authority=Path(environment[_AUTHORITY]),
        )

    def environment(self) -> dict[str, str]:
        """Variables of ``ray start``, and of all that speaks to this Ray."""
        paths = (self.certificate, self.key, self.authority)
        return {_SWITCH: "1"} | dict(zip(TLS_VARIABLES[1:], (str(path.resolve()) for path in paths), strict=True))

    def server_context(self) -> ssl.SSLContext:
        """For who is called: takes only callers that the cluster's authority has signed."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # No caller comes back to a session, and a caller that only writes would never read the ticket.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """For who calls: takes only the machine whose address was called."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context
