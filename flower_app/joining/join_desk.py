"""Answers to boxes that ask to join, or for their present state; see :mod:`flower_app.joining.join_service`."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Callable
from typing import Any

from flower_app.joining.join_code import token_digest
from flower_app.joining.join_folder import APPROVED, Box, JoinFolder
from flower_app.joining.join_request import CU_KIND, JoinRequest, read_line

_HASH = re.compile(r"[0-9a-f]{64}")


class WrongCode(ValueError):
    """A token that opens nothing."""


class JoinDesk:
    """Answers to boxes, over a network or in files."""

    def __init__(
        self, folder: JoinFolder, say: Callable[[str], None] = lambda _: None, *, auto_approve: bool = False
    ) -> None:
        self._folder, self._say = folder, say
        self._auto_approve = auto_approve
        self._authority = folder.authority.certificate.read_text(encoding="ascii")

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one line.

        Raises
        ------
        WrongCode
            For a token that is unknown, has expired, or was shown by another box.
        ValueError
            For anything else than a question, or a request with a wrong field.
        """
        question = read_line(line)
        if question == {"ask": "authority"}:
            return {"authority": self._authority}
        if set(question) == {"ask", "code", "claim"} and question["ask"] == "renew":
            # The digest names a file.
            if not isinstance(question["code"], str) or not _HASH.fullmatch(question["code"]):
                raise ValueError("code: expected a SHA-256 of 64 hexadecimal digits")
            box, claim_hash = self._folder.box(question["code"]), token_digest(_bytes(question["claim"]))
            if box is None or not hmac.compare_digest(box.request.claim_hash, claim_hash):
                raise WrongCode("no box has joined by this code with this secret")
            return self._state_of(box)
        if set(question) != {"ask", "token", "claim", "request"} or question["ask"] != "join":
            raise ValueError("expected the question authority, join or renew")
        token_hash, claim_hash = token_digest(_bytes(question["token"])), token_digest(_bytes(question["claim"]))
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
                kind = "control unit" if request.kind == CU_KIND else f"device of cluster {request.cluster}"
                remedy = "" if self._auto_approve else "collapipe approve "
                self._say(f"a box asks to join as a {kind}, from {request.host}: {remedy}{request.box_id}")
            box = self._folder.box(token_hash)
        if box is None or not hmac.compare_digest(box.request.claim_hash, claim_hash):
            self._say("warning: a code that one box has shown is shown by another; compare collapipe boxes with yours")
            raise WrongCode(
                "another box has shown this code before; if that was not yours, tell who runs the edge server, and ask "
                "for another"
            )
        return self._state_of(box)

    def _state_of(self, box: Box) -> dict[str, Any]:
        if box.status == APPROVED:
            return {"status": APPROVED, "superlink_port": self._folder.superlink_port(), **box.answer}
        return {"status": box.status, "box": box.box_id, "auto_approve": self._auto_approve}


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
