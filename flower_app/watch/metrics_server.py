"""``/metrics`` of a machine for Prometheus, which shows a token: ``collapipe up ... --metrics``."""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Thread
from typing import Any

from client_pipeline.link.hosts import HostPort, is_loopback

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IDLE_S = 5.0
"""Longest wait for the next bytes of a request, or of its TLS handshake [s]."""
MOST_SCRAPES = 16
"""Connections at a time; further ones are closed at once."""


def bearer(authorization: str | None) -> str:
    """Return the token of a header ``Authorization: Bearer``; empty if there is none."""
    kind, _, token = (authorization or "").partition(" ")
    return token if kind.lower() == "bearer" else ""


def is_token(word: str, token: str) -> bool:
    """Compare with the token, in a time that tells nothing of it."""
    return secrets.compare_digest(word.encode(), token.encode())


class _Handler(BaseHTTPRequestHandler):
    """One request: its connection is closed after the answer or an error."""

    server: _MetricsServer

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self._answer(404, "no such page\n")
        elif not is_token(bearer(self.headers["authorization"]), self.server.token):
            self._answer(403, "the metrics need the token, as Authorization: Bearer\n")
        else:
            self._answer(200, self.server.text())

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-type", CONTENT_TYPE)
        self.send_header("cache-control", "no-store")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


class _MetricsServer(ThreadingTCPServer):
    """Server with a bounded number of connections, in plain text or under TLS."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int, text: Callable[[], str], token: str, tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text, self.token, self._tls = text, token, tls
        self._free = BoundedSemaphore(MOST_SCRAPES)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(IDLE_S)
            if self._tls is not None:
                request = self._tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            # A client without TLS, or one that is gone.
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Close the connection without a traceback: the next request shows whether the error lasts."""


@contextmanager
def served_metrics(
    address: HostPort,
    text: Callable[[], str],
    token_file: Path,
    certificate: tuple[Path, Path] | None,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Serve a machine's metrics as long as its programs run.

    Raises
    ------
    ValueError
        If the address cannot be bound.
    """
    is_local = is_loopback(address.host)
    context = None
    if not is_local:
        assert certificate is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    token = token_file.read_text(encoding="utf-8").strip()
    try:
        server = _MetricsServer(address.bare_host, address.port, text, token, context)
    except OSError as error:
        raise ValueError(f"--metrics: {address} cannot be had: {error}; give another") from error
    with server:
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        place = HostPort(address.host, server.server_address[1])
        say(f"metrics: {'http' if is_local else 'https'}://{place}/metrics, for the token in {token_file}")
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
