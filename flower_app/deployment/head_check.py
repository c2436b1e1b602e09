"""Check that a machine and its cluster's Ray head believe each other; Ray tries for minutes and gives no reason."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from client_pipeline.link.hosts import HostPort
from client_pipeline.runtime.transport.node_tls import NodeTls

_TIMEOUT_S = 15.0
_AGAIN_S = 2.0
_ALPN = ["h2"]
"""Without it gRPC hangs up."""
_REMEDY = "let both machines join the same edge server: collapipe join CODE"


def check_head(head: HostPort, tls: NodeTls | None) -> None:
    """Shake hands with a Ray head as this machine's Ray is about to do; one that is too busy to answer passes.

    Parameters
    ----------
    head : its address
    tls : this machine's certificate; None on the loopback, where nothing is encrypted

    Raises
    ------
    ValueError
        Naming the side that refuses, and the remedy.
    """
    if tls is None:
        return
    context = tls.client_context()
    context.set_alpn_protocols(_ALPN)
    try:
        with socket.create_connection((head.bare_host, head.port), timeout=_TIMEOUT_S) as raw:
            with context.wrap_socket(raw, server_hostname=head.bare_host) as connection:
                # The head looks at our certificate after the handshake has ended here: it answers, or sends an alert.
                if not connection.recv(1):
                    raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"--cu: the certificate of {head} is not of this machine's cluster: {error.verify_message}; {_REMEDY}"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            raise ValueError(f"--cu: {head} speaks plain text, and this machine TLS; {_REMEDY}") from error
        raise ValueError(f"--state: {head} refuses this machine's certificate: {error.reason}; {_REMEDY}") from error
    except ConnectionResetError as error:
        raise ValueError(f"--state: {head} refuses this machine's certificate; {_REMEDY}") from error
    except OSError:
        # Not there, or too slow: Ray says so.
        return


def wait_for_head(head: HostPort, tls: NodeTls | None, timeout_s: float, say: Callable[[str], None]) -> None:
    """Check a head until it passes: a control unit with new certificates starts a little later."""
    deadline, is_told = time.monotonic() + timeout_s, False
    while True:
        try:
            return check_head(head, tls)
        except ValueError as error:
            if time.monotonic() > deadline:
                raise
            if not is_told:
                say(f"{error}; trying for {timeout_s:g} s")
                is_told = True
            time.sleep(_AGAIN_S)
