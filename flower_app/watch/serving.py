"""A small server beside what this process does, and the token without which it answers nobody."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request

if TYPE_CHECKING:
    import uvicorn

_END_S = 5.0


class ServerCertificate(NamedTuple):
    """Files (PEM) by which a server says who it is."""

    certificate: Path
    key: Path


def bearer(request: Request) -> str:
    """What a request shows as ``Authorization: Bearer``; empty if nothing."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""


def is_token(word: str, token: str) -> bool:
    """Whether ``word`` is the token, in a time that tells nothing of it."""
    return secrets.compare_digest(word.encode(), token.encode())


def server_of(app: Starlette, tls: ServerCertificate | None = None) -> uvicorn.Server:
    """Make the server of an application; it listens once it is run."""
    import uvicorn

    certificate, key = tls or (None, None)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )


@contextmanager
def running_beside(server: uvicorn.Server, listener: socket.socket, name: str) -> Iterator[None]:
    """Run a server in a thread until what this process does is done.

    Parameters
    ----------
    server : of :func:`server_of`
    listener : listens; is closed in the end
    name : of the thread
    """
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_END_S)
        listener.close()
