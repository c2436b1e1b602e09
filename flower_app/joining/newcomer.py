"""A box on its way into a deployment: it asks, waits until somebody has decided, and keeps what it is given."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.link.hosts import HostPort
from flower_app.deployment.authority import key_pem, supernode_keys, write_public, write_secret
from flower_app.deployment.credentials import CuFiles
from flower_app.joining.join_code import JoinCode, fingerprint_of
from flower_app.joining.join_folder import APPROVED, REFUSED, REVOKED, WAITING
from flower_app.joining.join_request import CU_KIND, JoinRequest, read_line

_MOST_ANSWER_BYTES = 64 * 1024
_CALL_S = 15.0
_AGAIN_S = 2.0
_CLAIM_BYTES = 32
_WHOLE = {"name", "cluster", "devices", "superlink_port", "ca", "certificate", "ray_token"}


class JoinRefused(ValueError):
    """The edge server does not let this box in."""


class _NotThere(OSError):
    """The edge server does not answer for now."""


@dataclass(frozen=True)
class BoxFolder:
    """What a box keeps of its joining: keys that it made itself, and what it was given for them.

    A device has the files of a control unit but the SuperNode's.
    """

    folder: Path

    @property
    def files(self) -> CuFiles:
        """Certificate, keys and secret, where ``collapipe up`` takes them."""
        return CuFiles(self.folder)

    @property
    def _claim_file(self) -> Path:
        return self.folder / "claim.json"

    @property
    def box_file(self) -> Path:
        """What it has become: written last."""
        return self.folder / "box.json"

    def claim(self, code: JoinCode) -> bytes:
        """The secret that goes with a code on this box alone."""
        kept = _read(self._claim_file)
        if not kept:
            kept = {"code": code.token_hash, "claim": secrets.token_hex(_CLAIM_BYTES)}
            write_secret(self._claim_file, json.dumps(kept).encode())
        return bytes.fromhex(str(kept["claim"]))

    def joined_by(self, code: JoinCode) -> bool:
        """Whether this box has joined by this very code."""
        return self.box_file.is_file() and _read(self._claim_file).get("code") == code.token_hash

    def keys(self, kind: str) -> tuple[ec.EllipticCurvePrivateKey, str]:
        """The box's key, and its SuperNode's public one; made if they are not there."""
        if not self.files.key.is_file():
            write_secret(self.files.key, key_pem(ec.generate_private_key(ec.SECP256R1())))
        key = serialization.load_pem_private_key(self.files.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        if kind != CU_KIND:
            return key, ""
        if not self.files.supernode_public_key.is_file():
            private, public = supernode_keys()
            write_secret(self.files.supernode_key, private)
            write_public(self.files.supernode_public_key, public)
        return key, self.files.supernode_public_key.read_text(encoding="ascii").strip()

    def keep(self, answer: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Write what an approved box was given."""
        write_public(self.files.ca, str(answer["ca"]).encode())
        write_public(self.files.certificate, str(answer["certificate"]).encode())
        write_secret(self.files.ray_token, str(answer["ray_token"]).encode())
        box = {key: answer.get(key) for key in ("name", "cluster", "devices", "cu")} | dict(more)
        write_secret(self.box_file, json.dumps(box, indent=1).encode())
        return box

    def box(self) -> dict[str, Any]:
        """What this box has become.

        Raises
        ------
        ValueError
            If it has not joined.
        """
        if not self.box_file.is_file():
            raise ValueError(
                f"CODE: expected a code, found none, and no {self.box_file} of a box that has joined; "
                "collapipe up edge-server --name HOST prints one"
            )
        return _read(self.box_file)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a box wants to be."""

    kind: str
    cluster: int
    devices: tuple[int, ...]
    host: str
    """Its address; empty: the one from which it reaches the edge server."""
    ray_port: int


def join_deployment(
    folder: BoxFolder,
    code: JoinCode,
    wish: Wish,
    wait_s: float,
    say: Callable[[str], None] = lambda _: None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask by a code until somebody has decided.

    Parameters
    ----------
    folder : for this code alone; what is there of an earlier attempt is used again
    code : as it was copied
    wish : what it wants to be
    wait_s : how long to wait for the approval [s]
    say : told whom to ask
    options : of the box's programs; kept with the rest, for the next start

    Returns
    -------
    ``box.json`` of the folder: ``name``, ``kind``, ``cluster``, ``devices``, ``host``, ``cu``, ``superlink`` and
    ``options``.

    Raises
    ------
    JoinRefused
        If the server cannot prove the fingerprint in the code, or refuses.
    ValueError
        If nobody has decided in time.
    """
    deadline = time.monotonic() + wait_s
    claim = folder.claim(code)
    key, supernode_key = folder.keys(wish.kind)
    connection = _Connection(code)
    authority = _patiently(connection.authority, deadline, say)
    request = JoinRequest(
        kind=wish.kind,
        cluster=wish.cluster,
        devices=wish.devices,
        host=wish.host or connection.own_host,
        ray_port=wish.ray_port,
        signing_request=_signing_request(key),
        supernode_key=supernode_key,
        claim_hash=hashlib.sha256(claim).hexdigest(),
    )
    question = {
        "ask": "join",
        "token": base64.b64encode(code.token).decode(),
        "claim": base64.b64encode(claim).decode(),
        "request": request.to_fields(),
    }
    is_named = False
    while (answer := _patiently(lambda: connection.ask(question, authority), deadline, say))["status"] == WAITING:
        if not is_named:
            say(f"this box is {request.box_id}; on the edge server: collapipe approve {request.box_id}")
            is_named = True
        if time.monotonic() > deadline:
            raise ValueError(
                f"nobody has approved {request.box_id} within {wait_s:g} s; the same command goes on waiting"
            )
        time.sleep(_AGAIN_S)
    if answer["status"] == APPROVED and not _WHOLE <= set(answer):
        raise JoinRefused(f"{code.address} approves, but leaves out {', '.join(sorted(_WHOLE - set(answer)))}")
    if answer["status"] != APPROVED:
        reason = {REFUSED: "it was refused there", REVOKED: "it was revoked there"}.get(str(answer["status"]))
        raise JoinRefused(f"{code.address} does not let this box in: {reason or answer.get('reason')}")
    _check_own(answer, key)
    superlink = str(HostPort(code.address.host, int(answer["superlink_port"])))
    say(f"this box is {answer['name']}")
    box_entry = {"kind": wish.kind, "host": request.host, "superlink": superlink, "options": dict(options or {})}
    return folder.keep(answer, box_entry)


class _Connection:
    """Questions to the service at a code's address."""

    def __init__(self, code: JoinCode) -> None:
        self._code = code
        self.own_host = ""
        """Address of this box on the way there."""

    def authority(self) -> str:
        """The authority's certificate (PEM), whose fingerprint is that of the code."""
        # Nothing is said here but what is public: whom to believe is what this asks.
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        pem = self._call({"ask": "authority"}, stranger).get("authority")
        try:
            fingerprint = fingerprint_of(x509.load_pem_x509_certificate(str(pem).encode()))
        except ValueError:
            fingerprint = b""
        if not hmac.compare_digest(fingerprint, self._code.fingerprint):
            raise JoinRefused(
                f"{self._code.address} is not who gave out the code: the fingerprint of its authority is another; it "
                "was told nothing. Copy the code again, over a channel that you trust"
            )
        return str(pem)

    def ask(self, question: Mapping[str, Any], authority: str) -> dict[str, Any]:
        """Ask a server that the authority has signed."""
        context = ssl.create_default_context(cadata=authority)
        answer = self._call(question, context)
        if not isinstance(answer.get("status"), str):
            raise JoinRefused(f"{self._code.address} answers something else than a joining service")
        return answer

    def _call(self, question: Mapping[str, Any], context: ssl.SSLContext) -> dict[str, Any]:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        host, port = self._code.address.bare_host, self._code.address.port
        deadline, data = time.monotonic() + _CALL_S, b""
        try:
            with socket.create_connection((host, port), timeout=_CALL_S) as raw:
                self.own_host = raw.getsockname()[0]
                with context.wrap_socket(raw, server_hostname=host) as tls:
                    tls.sendall(json.dumps(question).encode() + b"\n")
                    while not data.endswith(b"\n") and len(data) <= _MOST_ANSWER_BYTES:
                        # A timeout of each piece would let one byte after the other go on for hours.
                        if (remaining_s := deadline - time.monotonic()) <= 0:
                            raise TimeoutError(f"its answer does not end within {_CALL_S:g} s")
                        tls.settimeout(remaining_s)
                        if not (piece := tls.recv(4096)):
                            break
                        data += piece
        except ssl.SSLCertVerificationError as error:
            raise JoinRefused(
                f"{self._code.address} has no certificate of the authority in the code for this name: "
                f"{error.verify_message}; it was told nothing"
            ) from error
        except OSError as error:
            raise _NotThere(str(error)) from error
        try:
            return read_line(data)
        except ValueError as error:
            raise _NotThere(f"{len(data)} bytes that are no answer") from error


def _patiently(call: Callable[[], Any], deadline: float, say: Callable[[str], None]) -> Any:
    """Call until there is an answer: the edge server may start a little later, or anew."""
    is_reported = False
    while True:
        try:
            return call()
        except _NotThere as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"CODE: the edge server does not answer: {error}; start it, or check the address"
                ) from error
            if not is_reported:
                say(f"the edge server does not answer yet ({error}); trying again")
                is_reported = True
            time.sleep(_AGAIN_S)


def _check_own(answer: Mapping[str, Any], key: ec.EllipticCurvePrivateKey) -> None:
    """Refuse a certificate of another key: nothing would work with it."""
    spki = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = x509.load_pem_x509_certificate(str(answer["certificate"]).encode()).public_key()
    if signed.public_bytes(*spki) != key.public_key().public_bytes(*spki):
        raise JoinRefused("the edge server has signed another key than this box's; let it join by another code")


def _signing_request(key: ec.EllipticCurvePrivateKey) -> str:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
