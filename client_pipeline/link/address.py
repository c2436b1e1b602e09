"""Address of the decoder's service in a round, and channels to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc

from client_pipeline.link.frame_limits import DEFAULT_MAX_BYTES
from client_pipeline.link.hosts import is_here
from client_pipeline.link.keepalive import channel_options

SERVICE = "collapipe.Decoder"
METHOD = "Exchange"
NEWS_METHOD = "News"
WEIGHTS_METHOD = "Weights"


@dataclass(frozen=True, kw_only=True)
class DecoderAddress:
    """The decoder of one round, as a CU's Flower train message describes it. All values are scalars."""

    target: str
    """``host:port``."""
    token: str = field(repr=False)
    """Good for one stream of this round and cluster."""
    round: int
    cluster: int
    join_timeout_s: float = 60.0
    """Longest wait of the decoder for the other CUs before it welcomes this one."""
    step_timeout_s: float = 300.0
    """Longest wait of the decoder for the other CUs to close a step."""
    max_frame_bytes: int = DEFAULT_MAX_BYTES
    tls: bool = False
    root_certificate: str = ""
    """PEM text that the decoder's certificate is checked against."""

    def to_dict(self) -> dict[str, str | int | float | bool]:
        """Return scalars by name, as a Flower ConfigRecord takes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderAddress:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            If a value is missing, unknown or of another type.
        """
        kinds = {"str": str, "int": int, "float": float, "bool": bool}
        expected = {f.name: kinds[str(f.type)] for f in fields(cls)}
        wrong = sorted(expected.keys() ^ values.keys())
        wrong += [name for name, kind in expected.items() if name in values and type(values[name]) is not kind]
        if wrong:
            raise ValueError(f"address of the decoder: missing, unknown or of another type: {', '.join(wrong)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class LinkCertificates:
    """A CU's own files for TLS (PEM); empty where they are not needed."""

    certificate: str = ""
    """The CU's certificate, for mutual TLS."""
    key: str = field(default="", repr=False)
    """Path of its private key."""
    root_certificate: str = ""
    """Checks the decoder's certificate in place of the root that the train message brings."""

    @property
    def requires_tls(self) -> bool:
        """True if any file is given: this CU then connects under TLS only."""
        return bool(self.certificate or self.key or self.root_certificate)


def open_channel(address: DecoderAddress, certificates: LinkCertificates, most_bytes: int = 0) -> grpc.Channel:
    """Open a channel to the decoder, with TLS where the address says so.

    Parameters
    ----------
    address : the decoder's
    certificates : the CU's own
    most_bytes : of a message, either way; 0: as the address says

    Raises
    ------
    ValueError
        If a certificate file cannot be read, or the address is without TLS though this CU has certificates.
    """
    if certificates.requires_tls and not address.tls:
        raise ValueError(
            f"decoder at {address.target}: this control unit has certificates, but the order says no TLS: activations "
            "would be sent unencrypted; start the run with decoder.tls-certificate, decoder.tls-key and decoder.tls-ca"
        )
    # One connection per stream; a proxy for the outer world must not stand between two local processes.
    options = [*channel_options(most_bytes or address.max_frame_bytes), ("grpc.use_local_subchannel_pool", 1)]
    if is_here(address.target.rpartition(":")[0]):
        options.append(("grpc.enable_http_proxy", 0))
    if not address.tls:
        return grpc.insecure_channel(address.target, options=options)
    root = read_pem(certificates.root_certificate, "root certificate") or address.root_certificate.encode()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=root or None,
        private_key=read_pem(certificates.key, "private key"),
        certificate_chain=read_pem(certificates.certificate, "certificate"),
    )
    return grpc.secure_channel(address.target, credentials, options=options)


def read_pem(path: str, name: str) -> bytes | None:
    """Read a PEM file; None for an empty path.

    Raises
    ------
    ValueError
        If the file cannot be read or holds no PEM.
    """
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} {path}: {error.strerror}; give the path of a PEM file") from None
    if b"-----BEGIN" not in data:
        raise ValueError(f"{name} {path}: expected a PEM file (-----BEGIN ...), found something else")
    return data
