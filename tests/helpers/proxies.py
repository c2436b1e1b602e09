"""Reverse proxies in a thread of the test's own process, and peers that speak to them byte by byte."""

import asyncio
import contextlib
import http.server
import socket
import ssl
import threading

from client_pipeline.link.hosts import HostPort
from flower_app.deployment.certificate_authority import Authority
from flower_app.deployment.reverse_proxy import client_tls, server_tls

HOST = "127.0.0.1"


class Credentials:
    """An authority, and a certificate of it for the loopback."""

    def __init__(self, folder):
        authority = Authority.create(30)
        certificate, key = authority.issue_server([HOST], 30)
        self.authority, self.certificate, self.key = (str(folder / name) for name in ("ca.pem", "it.pem", "it.key"))
        for path, data in ((self.authority, authority.pem), (self.certificate, certificate), (self.key, key)):
            with open(path, "wb") as file:
                file.write(data)

    def server(self):
        """Settings of an end that is called."""
        return server_tls(self.certificate, self.key)

    def client(self):
        """Settings of an end that calls."""
        return client_tls(self.authority)


class ServerCredentials(Credentials):
    """Those of a server's folder."""

    def __init__(self, files):
        self.authority, self.certificate, self.key = str(files.ca), str(files.certificate), str(files.key)


class Behind:
    """A program that keeps what it was asked, and answers by ``answers``: status and body by path."""

    def __init__(self, credentials):
        self.requests, self.answers = [], {}
        behind = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                behind.requests.append((self.command, self.path, dict(self.headers), len(body)))
                answer = behind.answers.get(self.path, (200, str(len(body)).encode()))
                status, data = answer.pop(0) if isinstance(answer, list) else answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Server-Secret", "inside")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = handle_any

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self.server.socket = credentials.server().wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class RunningProxy:
    """A proxy that serves in a thread, and the lines that it has said."""

    def __init__(self, make, behind_port, credentials, bounds):
        self.said, self.credentials = [], credentials
        self.proxy = make(
            behind=HostPort(HOST, behind_port),
            behind_tls=credentials.client(),
            tls=credentials.server(),
            bounds=bounds,
            say=self.said.append,
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(120)

    async def _serve(self):
        def ready(port):
            self.port = port
            self._ready.set()

        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        with contextlib.suppress(asyncio.CancelledError):
            await self.proxy.serve(HostPort(HOST, 0), ready)

    def close(self):
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(120)

    def plain(self):
        """Connect without TLS."""
        return socket.create_connection((HOST, self.port), timeout=120)

    def peer(self):
        """Connect under TLS."""
        context = self.credentials.client()
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context.wrap_socket(self.plain(), server_hostname=HOST)

    def ask(self, data):
        """Send bytes on a connection of their own; returns all that comes back until it is closed or answered."""
        with self.peer() as peer:
            with contextlib.suppress(OSError):
                peer.sendall(data)
            return received(peer)

    def status(self, path, method="POST", body=b"", headers=()):
        lines = [f"{method} {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        return status_of(self.ask("\r\n".join([*lines, "", ""]).encode() + body))


def received(peer):
    """Read one answer, or what comes until the end."""
    data = b""
    with contextlib.suppress(OSError, ssl.SSLError):
        while not _is_whole(data) and (piece := peer.recv(4096)):
            data += piece
    return data


def _is_whole(data):
    head, end, body = data.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and len(body) >= sum(lengths)


def status_of(answer):
    """HTTP status of an answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
