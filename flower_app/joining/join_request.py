"""Request of a box that joins, checked field by field before anything else reads it."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.documents import json_value

CU_KIND, DEVICE_KIND = "control-unit", "device"
ANY_CLUSTER = -1
"""Cluster of a control unit that takes any free one."""
MOST_REQUEST_BYTES = 16 * 1024
"""Longest line of a box [byte]."""
_LARGEST_NUMBER = 9_999
_MOST_DEVICES = 64
_MOST_KEY_CHARACTERS = 4_000
_HEX = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A box that wants to join.

    Raises
    ------
    ValueError
        Naming the field, what was expected and, cut and escaped, what was found.
    """

    kind: str
    """``control-unit`` or ``device``."""
    cluster: int
    """Its cluster; for a control unit :data:`ANY_CLUSTER`, too."""
    devices: Sequence[int]
    """Devices that the machine is; none for a device that takes the next number."""
    host: str
    """Address of the box that others of its cluster reach."""
    ray_port: int
    """First port of its Ray."""
    signing_request: str
    """Certificate signing request (PEM): shows that the box has the key."""
    supernode_key: str
    """Public key of a control unit's SuperNode (OpenSSH); empty for a device."""
    claim_hash: str
    """SHA-256 of a secret that the box alone has; the answer goes to the owner of the secret."""

    def __post_init__(self) -> None:
        if self.kind not in (CU_KIND, DEVICE_KIND):
            raise ValueError(f"kind: expected {CU_KIND} or {DEVICE_KIND}, found {_shown(self.kind)}")
        least_cluster = ANY_CLUSTER if self.kind == CU_KIND else 0
        if not _is_number(self.cluster, least_cluster):
            raise ValueError(f"cluster: expected 0 to {_LARGEST_NUMBER}, found {_shown(self.cluster)}")
        if not isinstance(self.devices, list | tuple) or len(self.devices) > _MOST_DEVICES:
            raise ValueError(f"devices: expected at most {_MOST_DEVICES} numbers, found {_shown(self.devices)}")
        if not all(_is_number(device, 0) for device in self.devices) or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices: expected different numbers from 0, found {_shown(self.devices)}")
        if not isinstance(self.host, str) or not _is_host(self.host):
            raise ValueError(f"host: expected a name or an address, found {_shown(self.host)}")
        if not _is_number(self.ray_port, 1024, 65_535):
            raise ValueError(f"ray_port: expected 1024 to 65535, found {_shown(self.ray_port)}")
        if not isinstance(self.claim_hash, str) or not _HEX.fullmatch(self.claim_hash):
            raise ValueError("claim_hash: expected a SHA-256 of 64 hexadecimal digits")
        _public_key_of(self.signing_request)
        if self.kind == CU_KIND:
            _supernode_line(self.supernode_key)
        elif self.supernode_key != "":
            raise ValueError("supernode_key: expected none of a device")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> JoinRequest:
        """Make a request of fields from the network; every field must be there, and no other."""
        if unknown := set(fields) ^ set(cls.__dataclass_fields__):
            raise ValueError(
                f"expected the fields of a request, each once; found or missing: {_shown(sorted(unknown))}"
            )
        return cls(**fields)

    def to_fields(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """The box's key, which its certificate is for."""
        return _public_key_of(self.signing_request)

    @property
    def box_id(self) -> str:
        """The key's fingerprint, 64 bits of it: a box and ``collapipe boxes`` show the same."""
        return key_id(self.public_key)

    def supernode_line(self, name: str) -> bytes:
        """The SuperNode's key as the server's folder has it: the algorithm and the key, and our own name for it."""
        return _supernode_line(self.supernode_key) + f" {name}\n".encode()


def key_id(key: ec.EllipticCurvePublicKey) -> str:
    """16 hexadecimal digits that tell a key from others."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()[:16]


def receive_line(tls: ssl.SSLSocket, most_bytes: int, deadline: float) -> bytes:
    """Receive one line of at most about ``most_bytes`` until ``deadline``, on the clock of ``time.monotonic``.

    Raises
    ------
    TimeoutError, ValueError
        If the line does not end in time; if it is cut, or too long.
    """
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > most_bytes:
            raise ValueError("the line is too long")
        # A timeout of each piece would let one byte after the other go on for hours.
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the line does not end")
        tls.settimeout(remaining_s)
        if not (piece := tls.recv(4096)):
            raise ValueError("the line is cut")
        data += piece
    return data


def read_line(line: bytes) -> dict[str, Any]:
    """Read one line of the network: a JSON object, each key once.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    try:
        value = json_value(line.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"expected a JSON object in UTF-8, found {len(line)} bytes of something else") from error
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _public_key_of(signing_request: Any) -> ec.EllipticCurvePublicKey:
    if not isinstance(signing_request, str) or len(signing_request) > _MOST_KEY_CHARACTERS:
        raise ValueError(f"signing_request: expected text of at most {_MOST_KEY_CHARACTERS} characters")
    try:
        request = x509.load_pem_x509_csr(signing_request.encode())
        key = request.public_key()
        is_own = isinstance(key, ec.EllipticCurvePublicKey) and request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError("signing_request: expected a certificate signing request (PEM)") from error
    if not is_own or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("signing_request: expected one of an elliptic-curve key (P-256), signed by it")
    return key


def _supernode_line(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > _MOST_KEY_CHARACTERS:
        raise ValueError(f"supernode_key: expected text of at most {_MOST_KEY_CHARACTERS} characters")
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError("supernode_key: expected a public key in OpenSSH format") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("supernode_key: expected an elliptic-curve key (P-384), as Flower takes it")
    # Written anew: the comment behind the key is the box's.
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _is_number(value: Any, least: int, largest: int = _LARGEST_NUMBER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return bool(_HOST.fullmatch(host))
    # No zone: it is a name of the other machine's interface.
    return "%" not in host


def _shown(value: Any) -> str:
    return ascii(value)[:80]
