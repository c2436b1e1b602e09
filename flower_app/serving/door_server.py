"""The program that keeps the door open: addresses, TLS, the key's file, and clients that say nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from client_pipeline.link.hosts import is_loopback
from flower_app.serving.door import ANY_ADDRESS, door_app
from flower_app.serving.served_model import ServedModel

_MOST_CONNECTIONS = 256
_SILENT_S = 15
"""Time after which a connection without a whole request head is closed, new or kept alive [s]."""
_HEAD_BYTES = 16 << 10
_WATCH_S = 0.2


class PunctualProtocol(H11Protocol):
    """Closes connections on which no request comes: the server itself waits for the first one for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the time for the first request."""
        super().connection_made(transport)
        self.loop.call_later(_SILENT_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.close()


def serve_door(
    served: ServedModel,
    digest: bytes,
    listener: socket.socket,
    *,
    reader: str,
    tls: tuple[Path, Path] | None,
    opened: Callable[[], None] = lambda: None,
    until: Callable[[], str] = lambda: "",
) -> None:
    """Serve until Ctrl-C, or until there is a reason to end; requests in progress end with an error that says so.

    Parameters
    ----------
    served : the model
    digest : of the key
    listener : of :func:`open_door`
    reader : as of :func:`door_app`
    tls : certificate and private key; None: plain, on the loopback alone
    opened : called once certificate and key have been read
    until : returns the reason to end; empty as long as there is none
    """
    host = listener.getsockname()[0]
    hosts = {host, f"[{host}]", socket.gethostname().lower()}
    if ipaddress.ip_address(host).is_unspecified:
        # Any address of this machine; a page of elsewhere comes by a name.
        hosts.add(ANY_ADDRESS)
    if is_loopback(host):
        hosts |= {"localhost", "127.0.0.1", "[::1]"}
    config = uvicorn.Config(
        door_app(served, digest, sorted(hosts), reader),
        http=PunctualProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_SILENT_S,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    config.load()
    opened()
    server = uvicorn.Server(config)

    def watch() -> None:
        while not (server.should_exit or (reason := _asked(until))):
            time.sleep(_WATCH_S)
        # Before the server's own end, which would break answers off without a word.
        served.close(reason if not server.should_exit else "the door closes: its program was told to end")
        server.should_exit = True

    threading.Thread(target=watch, name="door-watch", daemon=True).start()
    server.run(sockets=[listener])


def _asked(until: Callable[[], str]) -> str:
    try:
        return until()
    except OSError:
        # Too many open files, or a disk's fault: asked again.
        return ""


def open_door(host: str, port: int, has_tls: bool) -> socket.socket:
    """Listen at an address of this machine.

    Raises
    ------
    ValueError
        If the address is none of this machine's, another program has the port, or keys would travel in the open.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"--host: expected an address of this machine, such as 127.0.0.1, found {host!r}") from None
    if not address.is_loopback and not has_tls:
        raise ValueError(
            f"--host: {host} is reached from other machines, and the key would travel in the open; give --tls-cert and "
            "--tls-key too"
        )
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--port: {port} on {host} cannot be had: {error}; give another, or 0 for any") from error
    listener.listen()
    return listener


def announce(
    served: ServedModel, listener: socket.socket, key: str, has_tls: bool, reader: str, say: Callable[[str], None]
) -> None:
    """Say where the door is, and the key once."""
    host, port = listener.getsockname()[:2]
    address = f"http{'s' if has_tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"model: {served.name}")
    say(f"API: {address}/v1   page: {address}/")
    say(f"key: {key}  (it is not shown again)" if key else "key: that of the last time; --new-key draws another")
    say(reader)
