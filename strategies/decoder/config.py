"""Addresses, certificates and time limits of the decoder's service: table ``[decoder]``."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass

from client_pipeline.link.frame_limits import DEFAULT_MAX_BYTES
from client_pipeline.link.hosts import is_loopback, split_address


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Table ``[decoder]``: addresses, certificates and limits of the decoder service."""

    bind: str = "127.0.0.1:0"
    """``host:port``; port 0 takes a free one. A host that other machines can reach needs TLS."""
    advertise: str = ""
    """``host`` or ``host:port`` that the CUs receive; empty: the bound address."""
    join_timeout: float = 60.0
    """Longest wait of a round's CUs for each other's hello [s]."""
    step_timeout: float = 300.0
    """Longest wait of a CU for the others to close a step [s]."""
    reply_timeout: float = 600.0
    """Longest wait for a CU's update after its goodbye to the decoder [s]."""
    max_frame_bytes: int = DEFAULT_MAX_BYTES
    """Largest frame that is accepted [byte]."""
    frames_per_second: float = 2000.0
    """Frames that are read from one stream in the long run; faster ones wait."""
    tls_certificate: str = ""
    """PEM file of the service's certificate, with its chain."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the CA that signed the certificates of the service and of the CUs: turns on mutual TLS."""
    tls_crl: str = ""
    """PEM file of the certificates that this CA has revoked; their streams are refused."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be served, or not safely."""
        host, _ = split_address("decoder.bind", self.bind)
        for name in ("join_timeout", "step_timeout", "reply_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"decoder.{name.replace('_', '-')}: expected seconds above 0, found {value}")
        if not (math.isfinite(self.frames_per_second) and self.frames_per_second >= 1):
            raise ValueError(f"decoder.frames-per-second: expected at least 1, found {self.frames_per_second}")
        if not 2**16 <= self.max_frame_bytes < 2**31:
            raise ValueError(f"decoder.max-frame-bytes: expected {2**16} to {2**31 - 1}, found {self.max_frame_bytes}")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("decoder.tls-certificate and decoder.tls-key: expected both or none, found one")
        if self.tls_ca and not self.tls_certificate:
            raise ValueError("decoder.tls-ca: mutual TLS also needs decoder.tls-certificate and decoder.tls-key")
        if self.tls_crl and not self.tls_ca:
            raise ValueError("decoder.tls-crl: a list of revoked certificates also needs decoder.tls-ca")
        if not is_loopback(host) and not self.tls_certificate:
            raise ValueError(
                f"decoder.bind: {self.bind!r} can be reached from other machines and there is no TLS; "
                "set decoder.tls-certificate and decoder.tls-key, or bind to 127.0.0.1"
            )
        if host in ("0.0.0.0", "[::]") and not self.advertise:
            raise ValueError(f"decoder.advertise: expected the address that CUs reach {self.bind!r} at, found none")
        if self.advertise and ":" in self.advertise:
            split_address("decoder.advertise", self.advertise)


def check_pair(certificate: str, key: str) -> None:
    """Refuse certificate and key files (PEM) that do not belong together; raises ValueError."""
    # gRPC itself would only say that it cannot listen.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"decoder.tls-certificate {certificate} and decoder.tls-key {key}: expected a certificate and its own "
            f"key without a password, found otherwise ({error.reason or error})"
        ) from None
