"""The edge server's record of codes, requests and answers, below ``certs/joining``.

::

    address.json         address of the service that boxes ask, and the SuperLink's port
    codes/HASH.json      end of a code's lifetime (Unix time); HASH is the SHA-256 of its token
    requests/HASH.json   request of the first box that showed the code; made once, never replaced
    answers/HASH.json    decision: a certificate with what belongs to it, or a refusal

Each file has one writer: ``collapipe invite``, the joining service, ``collapipe approve``. No file holds a token.
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

from client_pipeline.link.hosts import HostPort, split_address
from flower_app.deployment.certificate_authority import read_entries, write_public, write_secret
from flower_app.deployment.credentials import AUTHORITY, SERVER, AuthorityFiles, ServerFiles
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_request import CU_KIND, JoinRequest
from flower_app.runs.run_lock import guarded_file

JOINING = "joining"
WAITING, APPROVED, REFUSED, REVOKED = "waiting", "approved", "refused", "revoked"


@dataclass(frozen=True, kw_only=True)
class Box:
    """One box that has asked to join."""

    token_hash: str
    request: JoinRequest
    answer: Mapping[str, Any]
    """Empty as long as there is no decision."""
    status: str
    """``waiting``, ``approved``, ``refused`` or ``revoked``."""

    @property
    def box_id(self) -> str:
        """Fingerprint of its key."""
        return self.request.box_id

    @property
    def name(self) -> str:
        """``cu-0``, ``device-0-1``; empty before it is approved."""
        return str(self.answer.get("name", ""))

    @property
    def cluster(self) -> int:
        """Cluster of the box, or the one that it asks for."""
        return int(self.answer.get("cluster", self.request.cluster))

    @property
    def devices(self) -> list[int]:
        """Devices that the box is, or asks to be."""
        return list(self.answer.get("devices", self.request.devices))

    @property
    def is_control_unit(self) -> bool:
        """True for a control unit."""
        return self.request.kind == CU_KIND


@dataclass(frozen=True)
class JoinFolder:
    """Folder of the edge server."""

    root: Path
    """Folder that ``collapipe up edge-server --name`` makes, with the authority."""

    @property
    def folder(self) -> Path:
        """Folder of codes, requests and answers."""
        return self.root / JOINING

    @property
    def authority(self) -> AuthorityFiles:
        """Files of the authority."""
        return AuthorityFiles(self.root / AUTHORITY)

    @property
    def server(self) -> ServerFiles:
        """Files that the edge server's programs read."""
        return ServerFiles(self.root / SERVER)

    @property
    def _address_file(self) -> Path:
        return self.folder / "address.json"

    def note_address(self, joining: HostPort, superlink_port: int) -> None:
        """Note the address of the joining service, and the SuperLink's port for control units."""
        address = {"address": str(joining), "superlink_port": superlink_port}
        write_public(self._address_file, json.dumps(address).encode())

    def address(self) -> HostPort:
        """Return the address of the joining service."""
        return split_address(str(self._address_file), read_entries(self._address_file)["address"])

    def superlink_port(self) -> int:
        """Return the port that SuperNodes connect to."""
        return int(read_entries(self._address_file)["superlink_port"])

    def check(self) -> None:
        """Raise ``FileNotFoundError`` if no box can join here."""
        if not self._address_file.is_file():
            raise FileNotFoundError(
                f"--out: no file {self._address_file}; boxes join where collapipe up edge-server --name "
                "HOST was started, or collapipe invite --name HOST"
            )

    def invite(self, code: JoinCode, minutes: float) -> None:
        """Let one box join by a code for some minutes; remove unused codes that have expired."""
        for path in self._files("codes"):
            expired = read_entries(path).get("expires", 0.0) < time.time()
            if expired and not self._file("requests", path.stem).exists():
                path.unlink(missing_ok=True)
        self._write("codes", code.token_hash, {"expires": time.time() + 60 * minutes})

    def num_unused_codes(self) -> int:
        """Codes that a box may still show."""
        return sum(
            read_entries(path).get("expires", 0.0) >= time.time() and not self._file("requests", path.stem).exists()
            for path in self._files("codes")
        )

    def knows(self, token_hash: str) -> bool:
        """Return whether a code was ever given out, good or not."""
        return self._file("codes", token_hash).is_file()

    def is_expired(self, token_hash: str) -> bool:
        """Return whether a code has expired for boxes that have not shown it yet."""
        return bool(read_entries(self._file("codes", token_hash)).get("expires", 0.0) < time.time())

    def take(self, token_hash: str, request: JoinRequest) -> bool:
        """Note the first box that shows a code; return False if another box was first."""
        target = self._file("requests", token_hash)
        aside = target.with_name(f".{token_hash}.{request.box_id}")
        write_secret(aside, json.dumps(request.to_fields()).encode())
        try:
            # Unlike a rename, a link replaces nothing: of two simultaneous boxes one is first.
            os.link(aside, target)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def box(self, token_hash: str) -> Box | None:
        """Return the box that has shown a code; None if none has."""
        fields = read_entries(self._file("requests", token_hash))
        if not fields:
            return None
        answer = read_entries(self._file("answers", token_hash))
        status = str(answer.get("status", WAITING))
        if status == APPROVED and int(answer["serial"], 16) in self.server.revoked_serials():
            status = REVOKED
        return Box(token_hash=token_hash, request=JoinRequest.from_fields(fields), answer=answer, status=status)

    def boxes(self) -> list[Box]:
        """Return all boxes that have asked, in the order of their requests."""
        files = sorted(self._files("requests"), key=lambda path: path.stat().st_mtime_ns)
        return [box for path in files if (box := self.box(path.stem)) is not None]

    def find(self, box_id: str) -> Box:
        """Return the box by its name, or by the beginning of its id.

        Raises
        ------
        ValueError
            If there is none, or more than one.
        """
        boxes = self.boxes()
        matches = [box for box in boxes if box_id and (box.box_id.startswith(box_id) or box.name == box_id)]
        # After a revocation another box can have the same name.
        current = [box for box in matches if box.status in (WAITING, APPROVED)] or matches
        if len(current) != 1:
            known = ", ".join(box.box_id for box in boxes) or "none"
            raise ValueError(f"BOX: expected one box, found {len(current)} for {box_id!r}; known are {known}")
        return current[0]

    def answer(self, token_hash: str, answer: Mapping[str, Any]) -> None:
        """Write a decision."""
        self._write("answers", token_hash, answer)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Hold the lock of decisions: two at once would give two boxes the same name."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with guarded_file(self.folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _files(self, kind: str) -> list[Path]:
        return list((self.folder / kind).glob("[0-9a-f]*.json"))

    def _file(self, kind: str, token_hash: str) -> Path:
        return self.folder / kind / f"{token_hash}.json"

    def _write(self, kind: str, token_hash: str, value: Mapping[str, Any]) -> None:
        # The answer to an approved box has its cluster's secret in it.
        write_secret(self._file(kind, token_hash), json.dumps(value).encode())
