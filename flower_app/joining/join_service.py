"""Joining service of the edge server: TLS, one line in, one line out, everything bounded.

``python -m flower_app.joining.join_service HOST:PORT FOLDER [ask | approve]``. The service writes requests and reads
answers; it never reads the authority's key. With ``approve`` it says that the registrar approves every box.

It answers three questions. ``{"ask": "authority"}`` gets the authority's certificate, which is public: a box compares
it with its code's fingerprint before it says anything else. ``{"ask": "join", "token", "claim", "request"}`` gets the
state of the request; a box repeats it until there is a decision. ``{"ask": "renew", "code", "claim"}`` gets the same
for a box that has joined, and that has kept only the digest of its token.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from client_pipeline.link.hosts import HostPort, split_address
from flower_app.joining.join_desk import JoinDesk
from flower_app.joining.join_folder import JoinFolder
from flower_app.joining.join_request import MOST_REQUEST_BYTES, receive_line
from strategies.decoder.limits import HelloGuard, TooManyHellos

MOST_CONNECTIONS = 32
"""Largest number of connections at the same time."""
CONNECTION_S = 10.0
"""Longest life of a connection [s]."""
_STACK_BYTES = 1 << 20
_MOST_TEXT = 200


class JoinService:
    """A desk at a TCP port, under TLS 1.3."""

    def __init__(self, desk: JoinDesk, folder: JoinFolder, address: HostPort) -> None:
        self._desk = desk
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No session is resumed: the service keeps nothing of strangers.
        self._context.num_tickets = 0
        self._context.load_cert_chain(folder.server.certificate, folder.server.key)
        self._guard = HelloGuard(MOST_CONNECTIONS)
        family = socket.AF_INET6 if ":" in address.bare_host else socket.AF_INET
        self._listener = socket.create_server((address.bare_host, address.port), family=family, backlog=2048)
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Answer until :meth:`close`."""
        # Strangers can cause a thread, and so a stack, for each connection.
        threading.stack_size(_STACK_BYTES)
        while True:
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                # Too many files are open, or a connection went before it was taken.
                time.sleep(0.1)
                continue
            with suppress(OSError, TooManyHellos, RuntimeError):
                self._take_in(connection, peer)

    def close(self) -> None:
        """Listen no longer."""
        # Closing alone does not wake the thread that accepts connections.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _take_in(self, connection: socket.socket, peer: str) -> None:
        with ExitStack() as stack:
            stack.enter_context(closing(connection))
            connection.settimeout(CONNECTION_S)
            tls = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            stack.enter_context(closing(tls))
            place = self._guard.enter(peer, lambda: _hang_up(tls))
            stack.callback(self._guard.leave, place)
            threading.Thread(target=self._attend, args=(tls, peer, place), daemon=True).start()
            # The thread closes it.
            stack.pop_all()

    def _attend(self, tls: ssl.SSLSocket, peer: str, place: int) -> None:
        deadline = time.monotonic() + CONNECTION_S
        try:
            with closing(tls):
                tls.do_handshake()
                line = receive_line(tls, MOST_REQUEST_BYTES, deadline)
                try:
                    answer = self._desk.answer(line)
                except ValueError as error:
                    self._guard.wrong(peer, "refused")
                    answer = {"status": "error", "reason": str(error)[:_MOST_TEXT]}
                tls.settimeout(max(deadline - time.monotonic(), 0.1))
                tls.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError):
            # No TLS, no line, or a closed connection.
            self._guard.wrong(peer, "no question")
        finally:
            self._guard.leave(place)


def _hang_up(tls: ssl.SSLSocket) -> None:
    with suppress(OSError):
        # Not SSLSocket's shutdown: it removes TLS first, while another thread may be about to send.
        socket.socket.shutdown(tls, socket.SHUT_RDWR)


def main() -> None:
    """Serve until told to end."""
    address, root, *how = sys.argv[1:]
    folder = JoinFolder(Path(root))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    desk = JoinDesk(folder, say, auto_approve=how == ["approve"])
    JoinService(desk, folder, split_address("join_service", address)).serve()


if __name__ == "__main__":
    main()
