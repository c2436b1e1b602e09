"""Checks of certificates and keys: complete, valid, of this machine, and of one authority."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.counted import counted
from flower_app.deployment.certificate_authority import certificate_hosts, normal_host, read_certificate
from flower_app.deployment.credentials import CuFiles, DeviceFiles, ServerFiles
from flower_app.deployment.findings import Finding, failure, ok, warning

SOON_DAYS = 30
_SERVER = "start the edge server again: collapipe up edge-server --name HOST makes what is missing or old"
_BOX = "let this box join again: collapipe join CODE"


def _remedy(files: ServerFiles | DeviceFiles) -> str:
    return _SERVER if isinstance(files, ServerFiles) else _BOX


def check_certificate_files(files: ServerFiles | DeviceFiles) -> Iterator[Finding]:
    """Check that every file is there, and that only its owner may read a secret one."""
    missing = [path for path in files.required if not path.is_file()]
    for path in missing:
        what = "the SuperNode's private key" if path.name == "supernode.key" else "a file of this machine"
        yield failure("files", f"{path} is missing: {what}", _remedy(files))
    if not missing:
        yield ok("files", f"{files.folder} is complete")
    secret = [path for path in files.required if path.suffix in (".key", "") and path.is_file()]
    for path in secret:
        if path.stat().st_mode & 0o077:
            yield warning("files", f"other users may read {path}", f"chmod 600 {path}")


def check_certificate(files: ServerFiles | DeviceFiles, host: str = "") -> Iterator[Finding]:
    """Check the certificate by which the edge server and a box know each other.

    Parameters
    ----------
    files : of this machine
    host : name or address that the certificate must be for; empty: any
    """
    yield from _certificate(files.certificate, files.key, files.ca, host, _remedy(files))


def check_cluster_certificate(files: DeviceFiles, host: str = "") -> Iterator[Finding]:
    """Check the certificate by which the machines of a cluster know each other; parameters as for the other one."""
    yield from _certificate(files.node_certificate, files.key, files.cluster_ca, host, _BOX)


def _certificate(certificate: Path, key: Path, ca: Path, host: str, remedy: str) -> Iterator[Finding]:
    if not all(path.is_file() for path in (certificate, key, ca)):
        return
    try:
        certificate_read, authority = read_certificate(certificate), read_certificate(ca)
    except ValueError as error:
        yield failure("certificate", str(error), remedy)
        return
    yield from _validity("certificate", certificate, certificate_read, remedy)
    yield from _validity("authority", ca, authority, remedy)
    try:
        certificate_read.verify_directly_issued_by(authority)
        yield ok("authority", f"{ca} signed {certificate}")
    except (ValueError, TypeError, InvalidSignature):
        yield failure("authority", f"{certificate} was not signed by {ca}: they are of different authorities", remedy)
    yield from _key("certificate", certificate, key, certificate_read, remedy)
    if host:
        hosts = certificate_hosts(certificate_read)
        if normal_host(host) in hosts:
            yield ok("certificate", f"{certificate} is for {host}")
        else:
            mismatch = f"{certificate} is not for {host}, but for {', '.join(hosts) or 'no host'}"
            yield failure("certificate", mismatch, remedy)


def _validity(check: str, path: Path, certificate: x509.Certificate, remedy: str) -> Iterator[Finding]:
    now, until = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    if certificate.not_valid_before_utc > now:
        yield failure(
            check,
            f"{path} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and here it is "
            f"{now:%Y-%m-%d %H:%M} UTC",
            "set this machine's clock",
        )
    elif until < now:
        yield failure(check, f"{path} expired on {until:%Y-%m-%d}", remedy)
    elif (left := (until - now).days) < SOON_DAYS:
        yield warning(check, f"{path} expires in {counted(left, 'day')}", remedy)
    else:
        yield ok(check, f"{path} is valid until {until:%Y-%m-%d}")


def _key(
    check: str, certificate: Path, key: Path, certificate_read: x509.Certificate, remedy: str
) -> Iterator[Finding]:
    spki = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        public_key = serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        yield failure(check, f"{key} is not a private key without a password", remedy)
        return
    if public_key.public_bytes(*spki) == certificate_read.public_key().public_bytes(*spki):
        yield ok(check, f"{key} belongs to {certificate}")
    else:
        yield failure(check, f"{key} does not belong to {certificate}: it is the key of another certificate", remedy)


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
        yield failure("supernode key", f"{files.supernode_key} is not an elliptic-curve key in OpenSSH format", _BOX)


def check_known_supernodes(files: ServerFiles) -> Iterator[Finding]:
    """Check that the server knows SuperNodes at all."""
    names = sorted(path.stem for path in files.supernodes.glob("*.pub"))
    if names:
        yield ok("supernode keys", f"{', '.join(names)} may connect")
    else:
        yield warning("supernode keys", "no control unit has joined", "collapipe invite prints a code for one")
