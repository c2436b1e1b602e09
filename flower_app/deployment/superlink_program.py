"""Flower's SuperLink with two doors: control units reach its Fleet API alone, its own machine all of it.

Flower serves three APIs on one port: Fleet (SuperNodes, by their keys), Control (runs and the register of nodes) and
Runtime (server apps); the latter two ask nobody who they are. ``python -m flower_app.deployment.superlink_program
HOST:PORT OPTIONS`` runs ``flower-superlink OPTIONS``, whose ``--host`` and ``--port`` are the control door, and opens
the fleet door at ``HOST:PORT`` beside it. Its SuperExec is a fork of this program, and told when a run is started.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

from client_pipeline.link.hosts import split_address
from client_pipeline.quick_imports import quick_imports
from flower_app.deployment.bell import Bell, when_told
from flower_app.launch.waiting_program import SUPEREXEC, WaitingProgram

FLEET_PATHS = "/v1/fleet/"
HEALTH_PATH = "/health"
START_PATH = "/v1/control/start-run"
MAX_BODY_BYTES = 64 * 2**20
"""Longest body of a request at the fleet door; Flower sends arrays in pieces of 5 MiB."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Doors:
    """An ASGI application that answers all requests at one address, and at every other one those of SuperNodes.

    Parameters
    ----------
    application : the SuperLink's
    control : ``(host, port)`` of the listening socket where everything is answered
    max_body_bytes : longest body of a request at another address [byte]
    started : called when somebody has asked for a run at the control door
    """

    def __init__(
        self,
        application: Application,
        control: tuple[str, int],
        max_body_bytes: int = MAX_BODY_BYTES,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self._application = application
        self._control = control
        self._max_body_bytes = max_body_bytes
        self._started = started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        # The address of the socket that took the connection: no header can change it.
        if scope["type"] == "lifespan" or scope.get("server") == self._control:
            await self._application(scope, receive, send)
            if scope.get("path") == START_PATH:
                self._started()
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not _is_for_supernodes(scope):
            await _refuse(send, 403, b"This port is for SuperNodes. Runs are started on the edge server itself.\n")
        elif _declared_length(scope) > self._max_body_bytes:
            await _refuse(send, 413, b"The body is too long.\n")
        else:
            await self._application(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Cut the connection of a sender whose body is longer than allowed."""
        num_bytes = 0

        async def receive_some() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return {"type": "http.disconnect"} if num_bytes > self._max_body_bytes else message

        return receive_some


def _is_for_supernodes(scope: Scope) -> bool:
    if scope["path"] == HEALTH_PATH:
        return bool(scope["method"] == "GET")
    return bool(scope["method"] == "POST" and scope["path"].startswith(FLEET_PATHS))


def _declared_length(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in lengths if value.isdigit()), default=0)


async def _refuse(send: Send, status: int, reason: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(reason)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on a TCP port.

    Raises
    ------
    OSError
        If the port is in use, or the host is not of this machine.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def serve(
    application: Application, config: Any, fleet: tuple[str, int], started: Callable[[], None] = lambda: None
) -> None:
    """Serve until told to end, at the control door of ``config`` and at the ``fleet`` door, under TLS both.

    Parameters
    ----------
    application : the SuperLink's
    config : Flower's own configuration of the SuperLink
    fleet : host and port
    started : as of :class:`Doors`
    """
    import uvicorn

    from strategies.flower_internals import console_handler, get_uvicorn_log_config

    if config.ssl_certfile is None or not config.enable_supernode_auth:
        sys.exit("superlink_program: expected certificates and --enable-supernode-auth, found none")
    control_socket, fleet_socket = listening_socket(config.host, config.port), listening_socket(*fleet)
    host, port = control_socket.getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            app=Doors(application, (host, port), started=started),
            log_config=get_uvicorn_log_config(console_handler.level),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ws="none",
        )
    )
    server.run(sockets=[control_socket, fleet_socket])
    if not server.started:
        sys.exit("superlink_program: the SuperLink did not start; its output is above")


def main() -> None:
    """Run ``flower-superlink``; the first argument is ``HOST:PORT`` of the fleet door."""
    place = split_address("superlink_program", sys.argv.pop(1))
    with quick_imports():
        from strategies.flower_internals import (
            create_app,
            flower_superexec,
            flower_superlink_module,
            superexec_loop_module,
        )

    flower: Any = flower_superlink_module
    work = Bell()
    # Before Flower starts a thread.
    superexec = WaitingProgram(SUPEREXEC, lambda: when_told(work, superexec_loop_module, flower_superexec))
    flower.subprocess = SimpleNamespace(Popen=superexec.start, TimeoutExpired=subprocess.TimeoutExpired)

    def run(lifespan_config: Any) -> None:
        application = create_app(lifespan_config, flower.SuperLinkLifespan)
        serve(application, lifespan_config, (place.host, place.port), work.ring)

    if not hasattr(flower, "_run_superlink_http_api"):
        sys.exit("superlink_program: this release of flwr starts its SuperLink differently; install flwr 1.41")
    flower._run_superlink_http_api = run
    flower.flower_superlink()


if __name__ == "__main__":
    main()
