"""The service that boxes ask on their way into a deployment: TLS, one line in, one line out, everything bounded.

``python -m flower_app.joining.join_service HOST:PORT SUPERLINK_PORT FOLDER``. It writes requests and reads what was
decided about them; the authority's key is none of its business.

Three questions are answered. ``{"ask": "authority"}`` gets the authority's certificate, which is public: a box compares
it with its code's fingerprint before it says anything else. ``{"ask": "join", "token", "claim", "request"}`` gets what
became of the request; a box repeats it until somebody has decided. ``{"ask": "renew", "code", "claim"}`` gets the same
for a box that has joined, which has kept the digest of its token alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from client_pipeline.link.hosts import HostPort, split_address
from flower_app.deployment.superlink_program import listening_socket
from flower_app.joining.join_code import token_digest
from flower_app.joining.join_folder import APPROVED, Box, JoinFolder
from flower_app.joining.join_request import CU_KIND, MOST_REQUEST_BYTES, JoinRequest, read_line
from strategies.decoder.limits import HelloGuard, TooManyHellos

MOST_CONNECTIONS = 32
"""Boxes, or strangers, that are listened to at the same time."""
CONNECTION_S = 10.0
"""From the first byte of a connection to its last [s]."""
_STACK_BYTES = 1 << 20
_MOST_TEXT = 200
_HASH = re.compile(r"[0-9a-f]{64}")


class WrongCode(PermissionError):
    """Somebody shows a token that opens nothing."""


class JoinDesk:
    """What is answered, without a network.

    Parameters
    ----------
    folder : the edge server's
    superlink_port : that an approved control unit's SuperNode connects to
    say : told of boxes that have come
    """

    def __init__(self, folder: JoinFolder, superlink_port: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder, self._superlink_port, self._say = folder, superlink_port, say
        self._authority = folder.authority.certificate.read_text(encoding="ascii")

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one line.

        Raises
        ------
        WrongCode
            For a token that nobody was given, that has expired, or that another box has shown.
        ValueError
            For a line that is no question, or a request that cannot be.
        """
        question = read_line(line)
        if question == {"ask": "authority"}:
            return {"authority": self._authority}
        if set(question) == {"ask", "code", "claim"} and question["ask"] == "renew":
            return self._renew(question["code"], _digest(_bytes(question["claim"])))
        if set(question) != {"ask", "token", "claim", "request"} or question["ask"] != "join":
            raise ValueError("expected the question authority, join or renew")
        token_hash, claim_hash = token_digest(_bytes(question["token"])), _digest(_bytes(question["claim"]))
        if not self._folder.knows(token_hash):
            raise WrongCode("this code is none of ours")
        box = self._folder.box(token_hash)
        if box is None:
            if self._folder.is_expired(token_hash):
                raise WrongCode("the code has expired; ask for another: collapipe invite")
            if not isinstance(question["request"], dict):
                raise ValueError("request: expected an object")
            request = JoinRequest.from_fields(question["request"])
            if request.claim_hash != claim_hash:
                raise ValueError("claim: expected the secret whose digest the request has")
            if self._folder.take(token_hash, request):
                self._announce(request)
            box = self._folder.box(token_hash)
        if box is None or not hmac.compare_digest(box.request.claim_hash, claim_hash):
            self._say("warning: a code that one box has shown is shown by another; compare collapipe boxes with yours")
            raise WrongCode(
                "another box has shown this code before; if that was not yours, tell who runs the edge server, and ask "
                "for another"
            )
        return self._state_of(box)

    def _renew(self, token_hash: Any, claim_hash: str) -> dict[str, Any]:
        # It names a file.
        if not isinstance(token_hash, str) or not _HASH.fullmatch(token_hash):
            raise ValueError("code: expected a SHA-256 of 64 hexadecimal digits")
        box = self._folder.box(token_hash)
        if box is None or not hmac.compare_digest(box.request.claim_hash, claim_hash):
            raise WrongCode("no box has joined by this code with this secret")
        return self._state_of(box)

    def _state_of(self, box: Box) -> dict[str, Any]:
        if box.status == APPROVED:
            return {"status": APPROVED, "superlink_port": self._superlink_port, **box.answer}
        return {"status": box.status, "box": box.box_id}

    def _announce(self, request: JoinRequest) -> None:
        kind = "control unit" if request.kind == CU_KIND else f"device of cluster {request.cluster}"
        self._say(f"a box asks to join as a {kind}, from {request.host}: collapipe approve {request.box_id}")


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class JoinService:
    """A desk at a TCP port, under TLS 1.3.

    Parameters
    ----------
    desk : answers
    folder : has the server's certificate
    address : where it listens; port 0 takes any that is free
    """

    def __init__(self, desk: JoinDesk, folder: JoinFolder, address: HostPort) -> None:
        self._desk = desk
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nobody's session is resumed: what is kept of strangers takes no memory.
        self._context.num_tickets = 0
        self._context.load_cert_chain(folder.server.certificate, folder.server.key)
        self._guard = HelloGuard(MOST_CONNECTIONS)
        self._listener = listening_socket(address.host, address.port)
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Answer until :meth:`close`."""
        # A thread's stack is address space that strangers could have us take.
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
        # Closing alone would leave the thread that waits for connections waiting.
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
            # It is the thread's now.
            stack.pop_all()

    def _attend(self, tls: ssl.SSLSocket, peer: str, place: int) -> None:
        deadline = time.monotonic() + CONNECTION_S
        try:
            with closing(tls):
                tls.do_handshake()
                answer = self._reply(_line(tls, deadline), peer)
                tls.settimeout(max(deadline - time.monotonic(), 0.1))
                tls.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError):
            # No TLS, no line, or nobody there any more.
            self._guard.wrong(peer, "no question")
        finally:
            self._guard.leave(place)

    def _reply(self, line: bytes, peer: str) -> dict[str, Any]:
        try:
            return self._desk.answer(line)
        except (WrongCode, ValueError) as error:
            self._guard.wrong(peer, "refused")
            return {"status": "error", "reason": str(error)[:_MOST_TEXT]}


def _hang_up(tls: ssl.SSLSocket) -> None:
    with suppress(OSError):
        # Not its own: that takes TLS off first, while another thread may be about to send.
        socket.socket.shutdown(tls, socket.SHUT_RDWR)


def _line(tls: ssl.SSLSocket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > MOST_REQUEST_BYTES:
            raise ValueError("the line is too long")
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the line does not end")
        tls.settimeout(remaining_s)
        if not (piece := tls.recv(4096)):
            raise ValueError("the line is cut")
        data += piece
    return data


def main() -> None:
    """Serve until told to end."""
    address, superlink_port, root = sys.argv[1:]
    folder = JoinFolder(Path(root))
    desk = JoinDesk(folder, int(superlink_port), lambda text: print(text, file=sys.stderr, flush=True))
    JoinService(desk, folder, split_address("join_service", address)).serve()


if __name__ == "__main__":
    main()
