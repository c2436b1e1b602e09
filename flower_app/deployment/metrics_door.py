"""``--metrics`` of ``collapipe up``: where Prometheus asks a machine, checked before its programs start."""

# Apart from the server itself: most machines serve no metrics, and what serves them would stay in their memory.

from __future__ import annotations

import secrets
from pathlib import Path

from client_pipeline.link.hosts import HostPort, is_loopback, split_address
from flower_app.deployment.authority import write_secret
from flower_app.deployment.taken_ports import NeededPort

LEAST_CHARACTERS = 16
"""Of a token."""
_LOOPBACK = "127.0.0.1"
_TOKEN_FILE = "metrics-token"


def metrics_address(text: str) -> HostPort | None:
    """Read ``HOST:PORT``, or a port of the loopback; port 0 takes any that is free. None for an empty text.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if not text:
        return None
    return split_address("--metrics", f"{_LOOPBACK}:{text}" if text.isdigit() else text)


def metrics_ports(address: HostPort | None, has_certificate: bool) -> list[NeededPort]:
    """What has to be free for an address.

    Parameters
    ----------
    address : of :func:`metrics_address`
    has_certificate : whether this machine can encrypt what it answers

    Raises
    ------
    ValueError
        If others reach the address, and the machine has no certificate: the token would travel in plain text.
    """
    if address is None:
        return []
    if not is_loopback(address.host) and not has_certificate:
        raise ValueError(
            f"--metrics: {address.host} is reached by others, and this machine has no certificate by which to encrypt; "
            "give a port of the loopback, or make certificates: collapipe certs"
        )
    return [NeededPort("--metrics", address.bare_host, address.port, "for Prometheus")] if address.port else []


def metrics_token(state: Path) -> Path:
    """Return the file of the token that outlives the program; made if there is none.

    Parameters
    ----------
    state : the machine's folder

    Raises
    ------
    ValueError
        If the file holds fewer characters than a token has.
    """
    file = state.resolve() / _TOKEN_FILE
    if not file.is_file():
        write_secret(file, f"{secrets.token_urlsafe(24)}\n".encode())
    if (length := len(file.read_text(encoding="utf-8").strip())) < LEAST_CHARACTERS:
        raise ValueError(
            f"{file}: expected at least {LEAST_CHARACTERS} characters, found {length}; remove it for a new token"
        )
    return file
