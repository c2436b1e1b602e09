"""Join of a box: its keys and request, the answer over the network or in a file, the folder that keeps it."""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline import durable
from client_pipeline.link.hosts import HostPort
from flower_app.deployment.certificate_authority import (
    key_pem,
    read_entries,
    supernode_keys,
    write_public,
    write_secret,
)
from flower_app.deployment.credentials import CuFiles
from flower_app.joining.join_code import JoinCode, token_digest
from flower_app.joining.join_folder import APPROVED, REFUSED, REVOKED, WAITING
from flower_app.joining.join_request import CU_KIND, JoinRequest, key_id, read_line, receive_line

REQUEST, ANSWER = ".request", ".answer"
"""Endings of the files of a join without a network."""
_AGAIN_S = 2.0
_CLAIM_BYTES = 32
_OF_CLUSTER = ("ray_token", "cluster_ca", "node_certificate")
_WHOLE = {"name", "cluster", "devices", "superlink_port", "ca", "certificate", *_OF_CLUSTER}


@dataclass(frozen=True)
class BoxFolder:
    """Folder of a box: keys that it made itself, and the certificates and secrets of the edge server's answer."""

    folder: Path

    @property
    def files(self) -> CuFiles:
        """Certificates, keys and secret."""
        return CuFiles(self.folder)

    @property
    def _claim_file(self) -> Path:
        return self.folder / "claim.json"

    @property
    def box_file(self) -> Path:
        """Place of the box; written last."""
        return self.folder / "box.json"

    def claim(self, code: JoinCode) -> bytes:
        """Return the secret of this box for a code; make it if there is none."""
        kept = read_entries(self._claim_file)
        if not kept:
            kept = {"code": code.token_hash, "claim": secrets.token_hex(_CLAIM_BYTES)}
            write_secret(self._claim_file, json.dumps(kept).encode())
        return bytes.fromhex(str(kept["claim"]))

    def joined_by(self, code: JoinCode) -> bool:
        """Return whether this box has joined by this code."""
        return self.box_file.is_file() and read_entries(self._claim_file).get("code") == code.token_hash

    def keys(self, kind: str) -> tuple[ec.EllipticCurvePrivateKey, str]:
        """Return the box's key, and its SuperNode's public one; make them if they are not there."""
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
        """Write the answer to an approved box."""
        write_public(self.files.ca, str(answer["ca"]).encode())
        write_public(self.files.certificate, str(answer["certificate"]).encode())
        self.keep_of_cluster(answer)
        box = {key: answer.get(key) for key in ("name", "cluster", "devices", "cu")} | dict(more)
        write_secret(self.box_file, json.dumps(box, indent=1).encode())
        return box

    def keep_of_cluster(self, answer: Mapping[str, Any]) -> bool:
        """Write address, certificates and secret of the cluster; return whether they have changed.

        The secret comes last: it shows that the rest is complete.
        """
        box, cu = read_entries(self.box_file), answer.get("cu")
        is_moved = bool(box and cu and box.get("cu") != cu)
        if is_moved:
            write_secret(self.box_file, json.dumps(box | {"cu": cu}, indent=1).encode())
        if self.files.ray_token.is_file() and self.files.ray_token.read_text("ascii") == answer["ray_token"]:
            return is_moved
        write_public(self.files.cluster_ca, str(answer["cluster_ca"]).encode())
        write_public(self.files.node_certificate, str(answer["node_certificate"]).encode())
        write_secret(self.files.ray_token, str(answer["ray_token"]).encode())
        return True

    def renewal_question(self) -> dict[str, str]:
        """Return the question for the present state of this box."""
        claim = read_entries(self._claim_file)
        secret = base64.b64encode(bytes.fromhex(str(claim["claim"]))).decode()
        return {"ask": "renew", "code": str(claim["code"]), "claim": secret}

    def set_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the options of the box's programs; return the box's place."""
        box = self.box() | {"options": dict(options)}
        write_secret(self.box_file, json.dumps(box, indent=1).encode())
        return box

    def box(self) -> dict[str, Any]:
        """Return the box's place.

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
        return read_entries(self.box_file)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Place that a box asks for."""

    kind: str
    cluster: int
    devices: tuple[int, ...]
    host: str
    """Its address; empty: the one on the way to the edge server."""
    ray_port: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the box's programs; kept for the next start."""


def join_deployment(
    folder: BoxFolder,
    code: JoinCode,
    wish: Wish,
    wait_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Ask the edge server by a code until there is a decision.

    Parameters
    ----------
    folder : for this code alone; files of an earlier attempt are used again
    code : of the edge server
    wish : place that the box asks for
    wait_s : time to wait for the approval [s]
    say : reports the next step

    Returns
    -------
    ``box.json`` of the folder: ``name``, ``kind``, ``cluster``, ``devices``, ``host``, ``cu``, ``superlink``,
    ``joining`` (address of the service) and ``options``.

    Raises
    ------
    JoinRefused
        If the server cannot prove the fingerprint in the code, or refuses.
    ValueError
        If there is no decision in time.
    """
    deadline = time.monotonic() + wait_s
    authority, own_host = _patiently(lambda: trusted_authority(code), deadline, say)
    request, question = _question(folder, code, replace(wish, host=wish.host or own_host))
    is_named = False
    while (answer := _patiently(lambda: ask(code.address, question, authority), deadline, say))["status"] == WAITING:
        if not is_named:
            next_step = f"on the edge server: collapipe approve {request.box_id}"
            if answer.get("auto_approve"):
                needs_unit = "" if request.kind == CU_KIND else ", once its cluster has a control unit"
                next_step = f"it is let in by its code{needs_unit}"
            say(f"this box is {request.box_id}; {next_step}")
            is_named = True
        if time.monotonic() > deadline:
            raise ValueError(
                f"nobody has approved {request.box_id} within {wait_s:g} s; the same command goes on waiting"
            )
        time.sleep(_AGAIN_S)
    return _accept(folder, code, request, answer, wish.options, say)


def join_by_files(folder: BoxFolder, invitation: Path, wish: Wish, say: Callable[[str], None]) -> dict[str, Any]:
    """Join without a network: write a request file, and accept the answer file once it lies beside.

    Parameters
    ----------
    folder, wish, say : as for :func:`join_deployment`; ``wish.host`` is needed
    invitation : file of ``collapipe invite --file``; request and answer have its name with another ending

    Raises
    ------
    JoinRefused
        If the answer is not signed by the authority in the code, or is another box's.
    ValueError
        If the invitation has the name of one of the other files, or there is no ``wish.host``.
    """
    request_file, answer_file = (invitation.with_suffix(suffix) for suffix in (REQUEST, ANSWER))
    for path in (request_file, answer_file):
        durable.check_not_input("CODE", path, invitation)
    code = JoinCode.read(invitation.read_text(encoding="utf-8"))
    if not wish.host:
        raise ValueError(
            "--host: expected the address of this machine that the others of its cluster reach, found none"
        )
    request, question = _question(folder, code, wish)
    if not answer_file.is_file():
        write_secret(request_file, json.dumps(question).encode() + b"\n")
        say(
            f"this box is {request.box_id}; on the edge server: collapipe approve --file {request_file.name}; then put "
            f"{answer_file.name} beside {invitation}, and repeat this command"
        )
        return {}
    answer = _signed_answer(answer_file, code)
    box = _accept(folder, code, request, answer, wish.options, say)
    # Both have secrets that nobody needs any more.
    request_file.unlink(missing_ok=True)
    answer_file.unlink()
    return box


def _signed_answer(file: Path, code: JoinCode) -> dict[str, Any]:
    try:
        line, signature = file.read_bytes().splitlines()
        answer = read_line(line)
        authority = x509.load_pem_x509_certificate(str(answer.get("ca")).encode())
        key = authority.public_key()
        if hmac.compare_digest(authority.fingerprint(hashes.SHA256()), code.fingerprint) and isinstance(
            key, ec.EllipticCurvePublicKey
        ):
            key.verify(base64.b64decode(signature), line, ec.ECDSA(hashes.SHA256()))
            return answer
    except (ValueError, InvalidSignature):
        pass
    raise JoinRefused(
        f"{file}: expected an answer signed by the authority in the code, found another; let the edge server answer "
        "the request of this box: collapipe approve --file"
    )


def _question(folder: BoxFolder, code: JoinCode, wish: Wish) -> tuple[JoinRequest, dict[str, Any]]:
    """Return a box's request, and the question of the joining service with the code's token and the box's claim."""
    claim = folder.claim(code)
    key, supernode_key = folder.keys(wish.kind)
    request = JoinRequest(
        kind=wish.kind,
        cluster=wish.cluster,
        devices=wish.devices,
        host=wish.host,
        ray_port=wish.ray_port,
        signing_request=_signing_request(key),
        supernode_key=supernode_key,
        claim_hash=token_digest(claim),
    )
    return request, {
        "ask": "join",
        "token": base64.b64encode(code.token).decode(),
        "claim": base64.b64encode(claim).decode(),
        "request": request.to_fields(),
    }


def _accept(
    folder: BoxFolder,
    code: JoinCode,
    request: JoinRequest,
    answer: Mapping[str, Any],
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Keep an approval; raise :class:`JoinRefused` for any other answer."""
    if answer["status"] == APPROVED and not _WHOLE <= set(answer):
        raise JoinRefused(f"{code.address} approves, but leaves out {', '.join(sorted(_WHOLE - set(answer)))}")
    if answer["status"] != APPROVED:
        # The claim stays, so that the next attempt is refused alike.
        for path in (folder.files.key, folder.files.supernode_key, folder.files.supernode_public_key):
            path.unlink(missing_ok=True)
        reason = {REFUSED: "it was refused there", REVOKED: "it was revoked there"}.get(str(answer["status"]))
        raise JoinRefused(f"{code.address} does not let this box in: {reason or answer.get('reason')}")
    signed = x509.load_pem_x509_certificate(str(answer["certificate"]).encode()).public_key()
    if not isinstance(signed, ec.EllipticCurvePublicKey) or key_id(signed) != request.box_id:
        raise JoinRefused("the edge server has signed another key than this box's; let it join by another code")
    say(f"this box is {answer['name']}")
    box_entry = {
        "kind": request.kind,
        "host": request.host,
        "superlink": str(HostPort(code.address.host, int(answer["superlink_port"]))),
        "joining": str(code.address),
        "options": dict(options),
    }
    return folder.keep(answer, box_entry)


def _signing_request(key: ec.EllipticCurvePrivateKey) -> str:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def trusted_authority(code: JoinCode) -> tuple[str, str]:
    """Return the certificate (PEM) of the authority with the code's fingerprint, and this box's address on the way."""
    # The question has no secret: its answer says which authority to believe.
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    answer, own_host = call(code.address, {"ask": "authority"}, stranger)
    pem = str(answer.get("authority"))
    try:
        fingerprint = x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256())
    except ValueError:
        fingerprint = b""
    if not hmac.compare_digest(fingerprint, code.fingerprint):
        raise JoinRefused(
            f"{code.address} is not who gave out the code: the fingerprint of its authority is another; it "
            "was told nothing. Copy the code again, over a channel that you trust"
        )
    return pem, own_host


def _patiently(call: Callable[[], Any], deadline: float, say: Callable[[str], None]) -> Any:
    """Call until there is an answer: the edge server may start later, or again."""
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


_MOST_ANSWER_BYTES = 64 * 1024
_CALL_S = 15.0


class JoinRefused(ValueError):
    """The edge server does not let this box in."""


class NotThere(OSError):
    """The edge server does not answer for now."""


def ask(address: HostPort, question: Mapping[str, Any], authority: str) -> dict[str, Any]:
    """Ask a service that the authority (PEM) has signed; raises as :func:`call`."""
    answer, _ = call(address, question, ssl.create_default_context(cadata=authority))
    if not isinstance(answer.get("status"), str):
        raise JoinRefused(f"{address} answers something else than a joining service")
    return answer


def call(address: HostPort, question: Mapping[str, Any], context: ssl.SSLContext) -> tuple[dict[str, Any], str]:
    """Ask the service at an address.

    Returns
    -------
    Its answer, and the address of this machine on the way there.

    Raises
    ------
    JoinRefused
        If it cannot prove a certificate that ``context`` asks for; it was told nothing then.
    NotThere
        If it does not answer in time, or something else than a line of JSON.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    deadline = time.monotonic() + _CALL_S
    try:
        with socket.create_connection((address.bare_host, address.port), timeout=_CALL_S) as raw:
            own_host = str(raw.getsockname()[0])
            with context.wrap_socket(raw, server_hostname=address.bare_host) as tls:
                tls.sendall(json.dumps(question).encode() + b"\n")
                return read_line(receive_line(tls, _MOST_ANSWER_BYTES, deadline)), own_host
    except ssl.SSLCertVerificationError as error:
        raise JoinRefused(
            f"{address} has no certificate of the authority in the code for this name: "
            f"{error.verify_message}; it was told nothing"
        ) from error
    except TimeoutError as error:
        raise NotThere(f"its answer does not end within {_CALL_S:g} s") from error
    except OSError as error:
        raise NotThere(str(error)) from error
    except ValueError as error:
        raise NotThere(f"something else than an answer: {error}") from error
