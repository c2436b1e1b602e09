"""What the edge server keeps of the boxes that join, below ``certs/joining``.

::

    codes/HASH.json      until when a code is good (Unix time); HASH is the SHA-256 of its token
    requests/HASH.json   what the first box that showed it asks for; made once, never replaced
    answers/HASH.json    what was decided: a certificate with what belongs to it, or that there is none

Each file has one writer: who invites, the service that strangers reach, who approves. No token is in any of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from flower_app.deployment.authority import write_secret
from flower_app.deployment.credentials import AUTHORITY, SERVER, AuthorityFiles, ServerFiles
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_request import CU_KIND, JoinRequest

JOINING = "joining"
WAITING, APPROVED, REFUSED, REVOKED = "waiting", "approved", "refused", "revoked"


@dataclass(frozen=True, kw_only=True)
class Box:
    """One box that has asked to join."""

    token_hash: str
    request: JoinRequest
    answer: Mapping[str, Any]
    """Empty as long as nobody has decided."""
    status: str
    """``waiting``, ``approved``, ``refused`` or ``revoked``."""

    @property
    def box_id(self) -> str:
        """Which key it has."""
        return self.request.box_id

    @property
    def name(self) -> str:
        """``cu-0``, ``device-0-1``; empty before it is approved."""
        return str(self.answer.get("name", ""))

    @property
    def cluster(self) -> int:
        """The cluster that it is in, or asks for."""
        return int(self.answer.get("cluster", self.request.cluster))

    @property
    def devices(self) -> list[int]:
        """The devices that it is, or asks to be."""
        return list(self.answer.get("devices", self.request.devices))

    @property
    def is_control_unit(self) -> bool:
        """Whether it is a control unit."""
        return self.request.kind == CU_KIND


@dataclass(frozen=True)
class JoinFolder:
    """The folder of the edge server."""

    root: Path
    """That which ``collapipe certs`` and ``up edge-server --name`` write, with the authority."""

    @property
    def folder(self) -> Path:
        """Where all of it lies."""
        return self.root / JOINING

    @property
    def authority(self) -> AuthorityFiles:
        """Who signs."""
        return AuthorityFiles(self.root / AUTHORITY)

    @property
    def server(self) -> ServerFiles:
        """What the edge server's programs read."""
        return ServerFiles(self.root / SERVER)

    def check(self) -> None:
        """Raise ``FileNotFoundError`` if no box can join here."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"--out: no folder {self.folder}; boxes join where collapipe up edge-server --name HOST was started"
            )

    def invite(self, code: JoinCode, minutes: float) -> None:
        """Let one box join by a code, for a while; codes that nobody has used in time are forgotten."""
        for path in self._files("codes"):
            expired = _content(path).get("expires", 0.0) < time.time()
            if expired and not self._file("requests", path.stem).exists():
                path.unlink(missing_ok=True)
        self._write("codes", code.token_hash, {"expires": time.time() + 60 * minutes})

    def num_unused_codes(self) -> int:
        """Codes that a box may still show."""
        return sum(
            _content(path).get("expires", 0.0) >= time.time() and not self._file("requests", path.stem).exists()
            for path in self._files("codes")
        )

    def knows(self, token_hash: str) -> bool:
        """Whether a code was ever given out, good or not."""
        return self._file("codes", token_hash).is_file()

    def is_expired(self, token_hash: str) -> bool:
        """Whether a code that was given out is no longer good for a box that has not shown it."""
        return bool(_content(self._file("codes", token_hash)).get("expires", 0.0) < time.time())

    def take(self, token_hash: str, request: JoinRequest) -> bool:
        """Note the first box that shows a code; returns False if another one was before it."""
        target = self._file("requests", token_hash)
        aside = target.with_name(f".{token_hash}.{request.box_id}")
        write_secret(aside, json.dumps(request.to_fields()).encode())
        try:
            # Unlike a rename, a link replaces nothing: of two boxes that come at once one has it.
            os.link(aside, target)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def box(self, token_hash: str) -> Box | None:
        """The box that has shown a code; None if none has."""
        fields = _content(self._file("requests", token_hash))
        if not fields:
            return None
        answer = _content(self._file("answers", token_hash))
        status = str(answer.get("status", WAITING))
        if status == APPROVED and int(answer["serial"], 16) in self._revoked_serials():
            status = REVOKED
        return Box(token_hash=token_hash, request=JoinRequest.from_fields(fields), answer=answer, status=status)

    def boxes(self) -> list[Box]:
        """All boxes that have asked, in the order of their requests."""
        files = sorted(self._files("requests"), key=lambda path: path.stat().st_mtime_ns)
        return [box for path in files if (box := self.box(path.stem)) is not None]

    def find(self, box_id: str) -> Box:
        """The box whose id begins so, or whose name it is.

        Raises
        ------
        ValueError
            If there is none, or more than one.
        """
        boxes = self.boxes()
        matches = [box for box in boxes if box_id and (box.box_id.startswith(box_id) or box.name == box_id)]
        # A name is given anew once its box is revoked.
        current = [box for box in matches if box.status in (WAITING, APPROVED)] or matches
        if len(current) != 1:
            known = ", ".join(box.box_id for box in boxes) or "none"
            raise ValueError(f"BOX: expected one box, found {len(current)} for {box_id!r}; known are {known}")
        return current[0]

    def answer(self, token_hash: str, answer: Mapping[str, Any]) -> None:
        """Write what was decided."""
        self._write("answers", token_hash, answer)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """One decision at a time: two at once would give two boxes the same name."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _revoked_serials(self) -> set[int]:
        path = self.server.revoked_certificates
        if not path.is_file():
            return set()
        return {entry.serial_number for entry in x509.load_pem_x509_crl(path.read_bytes())}

    def _files(self, kind: str) -> list[Path]:
        return list((self.folder / kind).glob("[0-9a-f]*.json"))

    def _file(self, kind: str, token_hash: str) -> Path:
        return self.folder / kind / f"{token_hash}.json"

    def _write(self, kind: str, token_hash: str, value: Mapping[str, Any]) -> None:
        # What belongs to an approved box has its cluster's secret in it.
        write_secret(self._file(kind, token_hash), json.dumps(value).encode())


def _content(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it is not there."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
