"""``--metrics`` of ``collapipe up``: where Prometheus asks a machine, checked before its programs start."""

# Apart from the server itself: most machines serve no metrics, and what serves them would stay in their memory.

from __future__ import annotations

from client_pipeline.link.hosts import HostPort, is_loopback, split_address
from flower_app.deployment.taken_ports import NeededPort

_LOOPBACK = "127.0.0.1"


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
