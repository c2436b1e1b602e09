"""The server of ``collapipe watch``: one page, its state and its metrics, on the loopback, for who has the token."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from flower_app.watch.metrics_server import CONTENT_TYPE, bearer, is_token
from flower_app.watch.run_metrics import metrics_text
from flower_app.watch.run_state import WatchedRun

COOKIE = "collapipe-watch"
_END_S = 5.0
"""Longest wait for the server's end [s]."""
LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost", "[::1]")
_PAGE = {
    "": ("index.html", "text/html"),
    "watch.js": ("watch.js", "text/javascript"),
    "watch.css": ("watch.css", "text/css"),
    "uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
    "uPlot.min.css": ("uplot/uPlot.min.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def watch_app(run_dir: Path, token: str) -> Starlette:
    """Make the application.

    Parameters
    ----------
    run_dir : of the run that is watched
    token : asked for in the address of the first page, then in its cookie, or as ``Authorization: Bearer``
    """
    run = WatchedRun(run_dir)
    # A browser sends cookies to all ports of a host, but only below their path, which no other program is told.
    place = f"/{hashlib.sha256(token.encode()).hexdigest()[:32]}"

    def guarded(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            response = _refusal(request, token) or answer(request)
            response.headers.update(_HEADERS)
            return response

        return endpoint

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name not in _PAGE:
            return PlainTextResponse("no such page\n", 404)
        if not name and "token" in request.query_params:
            # The token leaves the address: it would stand in the browser's history.
            response: Response = RedirectResponse(f"{place}/", 303)
            cookie = f"{COOKIE}-{request.url.port}"
            response.set_cookie(cookie, token, path=f"{place}/", httponly=True, samesite="strict")
            return response
        file, media_type = _PAGE[name]
        text = (resources.files("flower_app.watch") / "page" / file).read_text(encoding="utf-8")
        return Response(text, media_type=media_type)

    def state(request: Request) -> Response:
        try:
            after, log = (int(request.query_params.get(key, "0")) for key in ("after", "log"))
        except ValueError:
            return PlainTextResponse("after and log: expected whole numbers\n", 400)
        return JSONResponse(run.state(after, log))

    def metrics(request: Request) -> Response:
        del request
        return PlainTextResponse(metrics_text(run), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route("/state", guarded(state)),
        Route("/metrics", guarded(metrics)),
        Route("/", guarded(page)),
        Route("/{name}", guarded(page)),
    ]
    return Starlette(routes=[Mount(place, routes=routes), *routes])


def _refusal(request: Request, token: str) -> Response | None:
    # A page of elsewhere whose name leads to the loopback sends its own name.
    if request.headers.get("host", "").rpartition(":")[0] not in _HOSTS:
        return PlainTextResponse("the page is for this machine alone\n", 403)
    shown = (
        request.query_params.get("token", ""),
        request.cookies.get(f"{COOKIE}-{request.url.port}", ""),
        bearer(request.headers.get("authorization")),
    )
    if any(is_token(word, token) for word in shown):
        return None
    return PlainTextResponse("the address needs the token that collapipe watch printed\n", 403)


def open_port(port: int, option: str = "--port") -> socket.socket:
    """Listen on a port of the loopback, which ``option`` names; 0: any free port.

    Raises
    ------
    ValueError
        If another program has the port.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(
            f"{option}: {port} on {LOOPBACK} cannot be had: {error}; give another, or 0 for any"
        ) from error
    listener.listen()
    return listener


def serve_watch(run_dir: Path, port: int, token: str, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    _server(run_dir, token).run(sockets=[_announced(open_port(port), token, say)])


@contextmanager
def watched(run_dir: Path, listener: socket.socket, token: str, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page beside what this process does, until that is done; ``listener`` is of :func:`open_port`."""
    server = _server(run_dir, token)
    sockets = [_announced(listener, token, say)]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_END_S)
        listener.close()


def _server(run_dir: Path, token: str) -> uvicorn.Server:
    config = uvicorn.Config(watch_app(run_dir, token), log_level="warning", access_log=False, lifespan="off")
    return uvicorn.Server(config)


def _announced(listener: socket.socket, token: str, say: Callable[[str], None]) -> socket.socket:
    say(f"watch: http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}")
    return listener
