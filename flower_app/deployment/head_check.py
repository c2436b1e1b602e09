"""Whether the head of a cluster's Ray and a machine believe each other: Ray would try for minutes, and not say."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from client_pipeline.link.hosts import HostPort
from client_pipeline.runtime.node_tls import NodeTls

_TIMEOUT_S = 15.0
_AGAIN_S = 2.0
_WATCH_S, _WATCH_TIMEOUT_S = 5.0, 2.0
"""How often a machine looks whether its head is still the same, and how long a look may take [s]."""
_ALPN = ["h2"]
"""Without it gRPC hangs up."""
_COPY = "start all machines of the cluster with folders of the same collapipe certs, or of the same edge server"


def check_head(head: HostPort, tls: NodeTls | None) -> None:
    """Shake hands with a Ray head as this machine's Ray is about to do; one that is too busy to answer passes.

    Parameters
    ----------
    head : its address
    tls : this machine's; None: it speaks plain text

    Raises
    ------
    ValueError
        Saying who does not believe whom, and the remedy.
    """
    context = _anybody() if tls is None else tls.client_context()
    context.set_alpn_protocols(_ALPN)
    try:
        with socket.create_connection((head.bare_host, head.port), timeout=_TIMEOUT_S) as raw:
            with context.wrap_socket(raw, server_hostname=head.bare_host) as connection:
                if tls is None:
                    raise ValueError(
                        f"--certs: the control unit at {head} speaks TLS, and this machine's folder has nothing of its "
                        f"cluster's authority; {_COPY}"
                    )
                # The head looks at our certificate after the handshake has ended here: it answers, or sends an alert.
                if not connection.recv(1):
                    raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"--cu: the certificate of {head} is not of this machine's cluster: {error.verify_message}; {_COPY}"
        ) from error
    except ssl.SSLError as error:
        if tls is None:
            return
        if error.reason == "WRONG_VERSION_NUMBER":
            raise ValueError(f"--cu: {head} speaks plain text, and this machine TLS; {_COPY}") from error
        raise ValueError(f"--certs: {head} refuses this machine's certificate: {error.reason}; {_COPY}") from error
    except ConnectionResetError as error:
        if tls is not None:
            raise ValueError(f"--certs: {head} refuses this machine's certificate; {_COPY}") from error
    except OSError:
        # Not there, or too slow: Ray says so.
        return


def wait_for_head(head: HostPort, tls: NodeTls | None, timeout_s: float, say: Callable[[str], None]) -> None:
    """Check a head until it passes: a control unit that is given new certificates starts a little later.

    Raises
    ------
    ValueError
        As :func:`check_head`, when the time is over.
    """
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


class HeadWatch:
    """Notices that a control unit's Ray was started anew: Ray itself asks the new one in vain for a minute, and busily.

    A control unit signs itself a certificate at each start. Where it has a lasting one, or none, nothing is noticed.

    Parameters
    ----------
    head : its address
    tls : this machine's; None: it speaks plain text
    """

    def __init__(self, head: HostPort, tls: NodeTls | None) -> None:
        self._head, self._tls = head, tls
        self._certificate: bytes | None = None
        """Of the head that this machine has joined."""
        self._look_at = 0.0

    def forget(self) -> None:
        """Look anew: who is there now is about to be joined."""
        self._certificate, self._look_at = None, 0.0

    def reason(self) -> str:
        """Why this machine has to join anew; empty while its head is there, or nobody is. Takes a look now and then."""
        if self._tls is None or time.monotonic() < self._look_at:
            return ""
        present = self._present(self._tls)
        self._look_at = time.monotonic() + _WATCH_S
        self._certificate = self._certificate or present
        if present in (None, self._certificate):
            return ""
        return f"the control unit's Ray at {self._head} was started anew, and this machine has joined the one before"

    def _present(self, tls: NodeTls) -> bytes | None:
        """The certificate of who answers there, of this cluster's authority; None: nobody, or somebody else."""
        try:
            context = tls.client_context()
            context.set_alpn_protocols(_ALPN)
            with (
                socket.create_connection((self._head.bare_host, self._head.port), timeout=_WATCH_TIMEOUT_S) as raw,
                context.wrap_socket(raw, server_hostname=self._head.bare_host) as connection,
            ):
                return connection.getpeercert(binary_form=True)
        except OSError:
            return None


def _anybody() -> ssl.SSLContext:
    """Only whether there is TLS at all is asked, and nothing is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
