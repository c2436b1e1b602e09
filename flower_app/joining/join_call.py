"""One question of a box to the joining service, and its answer: TLS 1.3, one line each, everything bounded."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from client_pipeline.link.hosts import HostPort
from flower_app.joining.join_request import read_line

_MOST_ANSWER_BYTES = 64 * 1024
_CALL_S = 15.0


class JoinRefused(ValueError):
    """The edge server does not let this box in."""


class NotThere(OSError):
    """The edge server does not answer for now."""


def ask(address: HostPort, question: Mapping[str, Any], authority: str) -> dict[str, Any]:
    """Ask a service that the authority (PEM) has signed; raises as :func:`call`."""
    answer, _ = call(address, question, ssl.create_default_context(cadata=authority))
    if not isinstance(answer.get("status"), str):
        raise JoinRefused(f"{address} answers something else than a joining service")
    return answer


def call(address: HostPort, question: Mapping[str, Any], context: ssl.SSLContext) -> tuple[dict[str, Any], str]:
    """Ask the service at an address.

    Returns
    -------
    Its answer, and the address of this machine on the way there.

    Raises
    ------
    JoinRefused
        If it cannot prove a certificate that ``context`` asks for; it was told nothing then.
    NotThere
        If it does not answer in time, or something else than a line of JSON.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    deadline, data = time.monotonic() + _CALL_S, b""
    try:
        with socket.create_connection((address.bare_host, address.port), timeout=_CALL_S) as raw:
            own_host = str(raw.getsockname()[0])
            with context.wrap_socket(raw, server_hostname=address.bare_host) as tls:
                tls.sendall(json.dumps(question).encode() + b"\n")
                while not data.endswith(b"\n") and len(data) <= _MOST_ANSWER_BYTES:
                    # A timeout of each piece would let one byte after the other go on for hours.
                    if (remaining_s := deadline - time.monotonic()) <= 0:
                        raise TimeoutError(f"its answer does not end within {_CALL_S:g} s")
                    tls.settimeout(remaining_s)
                    if not (piece := tls.recv(4096)):
                        break
                    data += piece
    except ssl.SSLCertVerificationError as error:
        raise JoinRefused(
            f"{address} has no certificate of the authority in the code for this name: "
            f"{error.verify_message}; it was told nothing"
        ) from error
    except OSError as error:
        raise NotThere(str(error)) from error
    try:
        return read_line(data), own_host
    except ValueError as error:
        raise NotThere(f"{len(data)} bytes that are no answer") from error
