"""Code by which one box joins: address of the service, a token for one use, fingerprint of the authority.

``HOST:PORT/TOKEN/FINGERPRINT``: the token has 128 random bits, the fingerprint is the SHA-256 of the authority's
certificate, both in URL-safe base64. A box shows the token to nobody before the server has proved a certificate that
this very authority signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from client_pipeline.link.hosts import HostPort, split_address

JOIN_PORT = 9095
LIFETIME_MINUTES = 60.0
"""Time within which a box must show a code, unless the command gives another [min]."""
_LONGEST_MINUTES = 7 * 24 * 60
_MOST_CODES = 1_000
_TOKEN_BYTES, _FINGERPRINT_BYTES = 16, 32
_MOST_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class JoinCode:
    """A code, read."""

    address: HostPort
    """Address of the service that answers boxes."""
    token: bytes = field(repr=False)
    fingerprint: bytes
    """SHA-256 of the authority's certificate (DER)."""

    @classmethod
    def new(cls, address: HostPort, authority: x509.Certificate) -> JoinCode:
        """Make a code that nobody has used."""
        return cls(
            address=address, token=secrets.token_bytes(_TOKEN_BYTES), fingerprint=authority.fingerprint(hashes.SHA256())
        )

    @classmethod
    def read(cls, text: str) -> JoinCode:
        """Read what a person has copied.

        Raises
        ------
        ValueError
            If it is no code; the message does not repeat it.
        """
        parts = text.strip().split("/")
        if len(text) > _MOST_CHARACTERS or len(parts) != 3:
            raise ValueError(f"CODE: expected HOST:PORT/TOKEN/FINGERPRINT, found {len(parts)} parts; {_AGAIN}")
        token, fingerprint = (_decoded(part) for part in parts[1:])
        if len(token) != _TOKEN_BYTES or len(fingerprint) != _FINGERPRINT_BYTES:
            raise ValueError(
                f"CODE: expected a token of {_TOKEN_BYTES} bytes and a fingerprint of {_FINGERPRINT_BYTES}, found "
                f"{len(token)} and {len(fingerprint)}; {_AGAIN}"
            )
        return cls(address=split_address("CODE", parts[0], JOIN_PORT), token=token, fingerprint=fingerprint)

    def __str__(self) -> str:
        return f"{self.address}/{_encoded(self.token)}/{_encoded(self.fingerprint)}"

    @property
    def token_hash(self) -> str:
        """SHA-256 of the token, which both sides keep."""
        return token_digest(self.token)


_AGAIN = "copy the whole code that collapipe up edge-server or collapipe invite has printed"


def check_invitation(codes: int, minutes: float) -> None:
    """Raise ``ValueError`` for a number of codes or minutes out of range."""
    if not 1 <= codes <= _MOST_CODES:
        raise ValueError(f"--codes: expected 1 to {_MOST_CODES}, found {codes}")
    if not 0 < minutes <= _LONGEST_MINUTES:
        raise ValueError(f"--minutes: expected more than 0, and at most a week ({_LONGEST_MINUTES}), found {minutes:g}")


def token_digest(token: bytes) -> str:
    """Return the SHA-256 of a token or another secret, in hexadecimal."""
    return hashlib.sha256(token).hexdigest()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
