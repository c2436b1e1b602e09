"""A box on its way into a deployment: it asks, waits until somebody has decided, and keeps what it is given."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
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
from flower_app.joining.join_call import JoinRefused, NotThere, ask, call
from flower_app.joining.join_code import JoinCode, fingerprint_of
from flower_app.joining.join_folder import APPROVED, REFUSED, REVOKED, WAITING
from flower_app.joining.join_request import CU_KIND, JoinRequest

_AGAIN_S = 2.0
_CLAIM_BYTES = 32
_OF_CLUSTER = ("ray_token", "cluster_ca", "node_certificate")
_WHOLE = {"name", "cluster", "devices", "superlink_port", "ca", "certificate", *_OF_CLUSTER}


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
        self.keep_of_cluster(answer)
        box = {key: answer.get(key) for key in ("name", "cluster", "devices", "cu")} | dict(more)
        write_secret(self.box_file, json.dumps(box, indent=1).encode())
        return box

    def keep_of_cluster(self, answer: Mapping[str, Any]) -> bool:
        """Write what the machines of its cluster know each other by; returns whether it is something else than before.

        The secret comes last: whoever has the new one has all of it.
        """
        if self.files.ray_token.is_file() and self.files.ray_token.read_text("ascii") == answer["ray_token"]:
            return False
        write_public(self.files.cluster_ca, str(answer["cluster_ca"]).encode())
        write_public(self.files.node_certificate, str(answer["node_certificate"]).encode())
        write_secret(self.files.ray_token, str(answer["ray_token"]).encode())
        return True

    def renewal_question(self) -> dict[str, str]:
        """What asks the edge server for the present state of this box, by the secret that it alone has."""
        claim = _read(self._claim_file)
        secret = base64.b64encode(bytes.fromhex(str(claim["claim"]))).decode()
        return {"ask": "renew", "code": str(claim["code"]), "claim": secret}

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
    ``box.json`` of the folder: ``name``, ``kind``, ``cluster``, ``devices``, ``host``, ``cu``, ``superlink``,
    ``joining`` (address of the service) and ``options``.

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
    box_entry = {
        "kind": wish.kind,
        "host": request.host,
        "superlink": superlink,
        "joining": str(code.address),
        "options": dict(options or {}),
    }
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
        answer, self.own_host = call(self._code.address, {"ask": "authority"}, stranger)
        pem = answer.get("authority")
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
        return ask(self._code.address, question, authority)


def _patiently(call: Callable[[], Any], deadline: float, say: Callable[[str], None]) -> Any:
    """Call until there is an answer: the edge server may start a little later, or anew."""
    is_reported = False
    while True:
        try:
            return call()
        except NotThere as error:
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
