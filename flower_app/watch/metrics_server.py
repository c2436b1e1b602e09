"""``/metrics`` of a machine's own, for who has the token: ``collapipe up ... --metrics``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from client_pipeline.link.hosts import HostPort, is_loopback
from flower_app.watch.prometheus_text import CONTENT_TYPE
from flower_app.watch.serving import ServerCertificate, bearer, is_token, running_beside, server_of


def metrics_app(text: Callable[[], str], token: str) -> Starlette:
    """Make the application.

    Parameters
    ----------
    text : makes the metrics, each time anew
    token : asked for as ``Authorization: Bearer``
    """

    async def metrics(request: Request) -> PlainTextResponse:
        if not is_token(bearer(request), token):
            return PlainTextResponse("the metrics need the token, as Authorization: Bearer\n", 403)
        return PlainTextResponse(text(), headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    return Starlette(routes=[Route("/metrics", metrics)])


@contextmanager
def served_metrics(
    address: HostPort,
    text: Callable[[], str],
    token_file: Path,
    tls: ServerCertificate | None,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Serve a machine's metrics as long as its programs run.

    Parameters
    ----------
    address : on the loopback in plain text, elsewhere under TLS
    text : makes the metrics
    token_file : holds the token
    tls : this machine's certificate; None only on the loopback
    say : told the address

    Raises
    ------
    ValueError
        If nobody may listen there.
    """
    is_local = is_loopback(address.host)
    assert is_local or tls is not None
    token = token_file.read_text(encoding="utf-8").strip()
    family = socket.AF_INET6 if ":" in address.bare_host else socket.AF_INET
    try:
        listener = socket.create_server((address.bare_host, address.port), family=family)
    except OSError as error:
        raise ValueError(f"--metrics: {address} cannot be had: {error}; give another") from error
    place = HostPort(address.host, listener.getsockname()[1])
    server = server_of(metrics_app(text, token), None if is_local else tls)
    with running_beside(server, listener, "metrics"):
        say(f"metrics: {'http' if is_local else 'https'}://{place}/metrics, for the token in {token_file}")
        yield
