"""Option ``--metrics``: address at which Prometheus asks a machine, checked before its programs start."""

# Apart from the server itself: most machines serve no metrics, and what serves them would stay in their memory.

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from client_pipeline.link.hosts import HostPort, is_loopback, split_address
from flower_app.deployment.certificate_authority import write_secret
from flower_app.deployment.machine_checks import NeededPort

LEAST_CHARACTERS = 16
"""Least length of a token."""
_LOOPBACK = "127.0.0.1"
_TOKEN_FILE = "metrics-token"


def metrics_address(text: str, option: str = "--metrics") -> HostPort | None:
    """Read ``HOST:PORT``, or a port of the loopback; port 0 takes any that is free. None for an empty text.

    Parameters
    ----------
    text : value of the option
    option : for messages

    Raises
    ------
    ValueError
        If it is neither.
    """
    if not text:
        return None
    return split_address(option, f"{_LOOPBACK}:{text}" if text.isdigit() else text)


def metrics_ports(
    address: HostPort | None, has_certificate: bool, option: str = "--metrics", purpose: str = "for Prometheus"
) -> list[NeededPort]:
    """Return the port that must be free for an address.

    Parameters
    ----------
    address : of :func:`metrics_address`
    has_certificate : whether the machine can encrypt
    option, purpose : for messages

    Raises
    ------
    ValueError
        If others reach the address, and the machine has no certificate: the token would travel in plain text.
    """
    if address is None:
        return []
    if not is_loopback(address.host) and not has_certificate:
        raise ValueError(
            f"{option}: {address.host} is reached by others, and this machine has no certificate by which to encrypt; "
            "give a port of the loopback"
        )
    return [NeededPort(option, address.bare_host, address.port, purpose)] if address.port else []


def open_metrics(
    address: str,
    metrics: Callable[[], Callable[[], str]],
    state: Path,
    certificate: tuple[Path, Path] | None,
    say: Callable[[str], None],
) -> AbstractContextManager[None]:
    """Serve a machine's metrics while the context is open; nothing for an empty address.

    Parameters
    ----------
    address : value of ``--metrics``
    metrics : makes the function that returns the page; called where metrics are served
    state : the machine's folder
    certificate : certificate and key of this machine; None: plain text, on the loopback alone
    say : receives the address
    """
    place = metrics_address(address)
    if place is None:
        return nullcontext()
    # Not above: most machines serve no metrics, and this module stays in memory as long as the machine runs.
    from flower_app.watch.metrics_server import served_metrics

    return served_metrics(place, metrics(), metrics_token(state), certificate, say)


def metrics_token(state: Path) -> Path:
    """Return the file of the token that outlives the program; made if there is none.

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
