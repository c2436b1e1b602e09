"""Checks of certificates and keys: whole, valid, the machine's own, and of one authority."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flower_app.deployment.authority import read_certificate
from flower_app.deployment.certs import certificate_hosts, normal_host
from flower_app.deployment.credentials import ClusterFiles, CuFiles, ServerFiles
from flower_app.deployment.findings import Finding, failure, ok, warning

_SOON_DAYS = 30
_RENEW = "run collapipe certs --renew where the authority is, copy the folder here, and start the programs again"
_COPY = "copy the whole folder that collapipe certs made for this machine"


def check_certificate_files(files: ServerFiles | ClusterFiles) -> Iterator[Finding]:
    """Check that every file is there, and that its owner alone may read what is secret."""
    missing = [path for path in files.files() if not path.is_file()]
    for path in missing:
        what = "the SuperNode's private key" if path.name == "supernode.key" else "a file of this machine"
        yield failure("files", f"{path} is missing: {what}", _COPY)
    if not missing:
        yield ok("files", f"{files.folder} is complete")
    own_files = [*files.files(), *([files.cluster_key] if isinstance(files, ClusterFiles) else [])]
    secret = [path for path in own_files if path.suffix in (".key", "") and path.is_file()]
    for path in secret:
        if path.stat().st_mode & 0o077:
            yield warning("files", f"other users may read {path}", f"chmod 600 {path}")


def check_certificate(certificate: Path, key: Path, ca: Path, host: str = "") -> Iterator[Finding]:
    """Check that a certificate is valid by now, for ``host``, signed by the authority, and that the key is its own."""
    if not all(path.is_file() for path in (certificate, key, ca)):
        return
    try:
        certificate_read, authority = read_certificate(certificate), read_certificate(ca)
    except ValueError as error:
        yield failure("certificate", str(error), _COPY)
        return
    yield from _validity("certificate", certificate, certificate_read)
    yield from _validity("authority", ca, authority)
    try:
        certificate_read.verify_directly_issued_by(authority)
        yield ok("authority", f"{ca} signed {certificate}")
    except (ValueError, TypeError, InvalidSignature):
        yield failure(
            "authority",
            f"{certificate} was not signed by {ca}: they are of different authorities",
            "make all folders with one collapipe certs, and copy them anew to all machines",
        )
    yield from _key("certificate", certificate, key, certificate_read)
    if host:
        hosts = certificate_hosts(certificate_read)
        if normal_host(host) in hosts:
            yield ok("certificate", f"{certificate} is for {host}")
        else:
            yield failure(
                "certificate",
                f"{certificate} is not for {host}, but for {', '.join(hosts) or 'no host'}",
                f"run collapipe certs --renew --server {host} where the authority is, and copy the folder here",
            )


def _validity(check: str, path: Path, certificate: x509.Certificate) -> Iterator[Finding]:
    now, until = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    if certificate.not_valid_before_utc > now:
        yield failure(
            check,
            f"{path} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and here it is "
            f"{now:%Y-%m-%d %H:%M} UTC",
            "set this machine's clock",
        )
    elif until < now:
        yield failure(check, f"{path} expired on {until:%Y-%m-%d}", _RENEW)
    elif (left := (until - now).days) < _SOON_DAYS:
        yield warning(check, f"{path} expires in {left} days", _RENEW)
    else:
        yield ok(check, f"{path} is valid until {until:%Y-%m-%d}")


def _key(check: str, certificate: Path, key: Path, certificate_read: x509.Certificate) -> Iterator[Finding]:
    spki = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        public_key = serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        yield failure(check, f"{key} is not a private key without a password", _COPY)
        return
    if public_key.public_bytes(*spki) == certificate_read.public_key().public_bytes(*spki):
        yield ok(check, f"{key} belongs to {certificate}")
    else:
        yield failure(check, f"{key} does not belong to {certificate}: it is the key of another certificate", _COPY)


def check_supernode_key(files: CuFiles) -> Iterator[Finding]:
    """Check that the SuperNode's key is one that Flower takes."""
    if not files.supernode_key.is_file():
        return
    try:
        key = serialization.load_ssh_private_key(files.supernode_key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, ec.EllipticCurvePrivateKey):
        yield ok("supernode key", f"{files.supernode_key} is an elliptic-curve key")
    else:
        yield failure("supernode key", f"{files.supernode_key} is not an elliptic-curve key in OpenSSH format", _COPY)


def check_known_supernodes(files: ServerFiles) -> Iterator[Finding]:
    """Check that the server knows SuperNodes at all."""
    names = sorted(path.stem for path in files.supernodes.glob("*.pub"))
    if names:
        yield ok("supernode keys", f"{', '.join(names)} may connect")
    else:
        yield failure("supernode keys", f"no public key of a SuperNode in {files.supernodes}: none may connect", _COPY)
