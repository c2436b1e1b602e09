"""Certificate authorities of a deployment: one for the edge server and the boxes, and one for each cluster."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from client_pipeline import durable
from flower_app.deployment.credentials import AuthorityFiles

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
"""Validity of the certificates of the edge server and of boxes."""
_BACKDATED = datetime.timedelta(hours=1)
"""Tolerance for machines whose clocks are behind."""
_HERE = ("localhost", "127.0.0.1", "::1")
"""Names at which processes of one machine reach each other."""


@dataclass(frozen=True)
class Authority:
    """Certificate and private key that sign other certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, days: int = AUTHORITY_DAYS, title: str = "CollaPipe authority") -> Authority:
        """Make a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(title), _name(title), key.public_key(), days, signs_certificates=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, files: AuthorityFiles) -> Authority:
        """Read an authority that :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            If a file is missing, is no certificate or key, or the authority has expired.
        """
        files.check()
        certificate = read_certificate(files.certificate)
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{files.key}: expected an elliptic-curve key, as CollaPipe makes it")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise ValueError(
                f"{files.certificate}: the authority expired on {certificate.not_valid_after_utc:%Y-%m-%d}; move the "
                "folder of certificates away, start collapipe up edge-server --name HOST, and let all boxes join again"
            )
        return cls(certificate, key)

    def save(self, files: AuthorityFiles) -> None:
        """Write key and certificate; where there is a certificate, both are there."""
        write_secret(files.key, key_pem(self.key))
        write_public(files.certificate, self.pem)

    @property
    def pem(self) -> bytes:
        """The certificate, PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue_server(self, hosts: Sequence[str], days: int) -> tuple[bytes, bytes]:
        """Return certificate and key (PEM) of a server that is reached at ``hosts`` (names or addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        return self._sign(key.public_key(), hosts[0], days, purposes, _reached_at(hosts)), key_pem(key)

    def sign_node(self, key: ec.EllipticCurvePublicKey, host: str, days: int) -> bytes:
        """Return the certificate (PEM) of a machine at ``host``, for both ends of a connection in its cluster."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._sign(key, host, days, purposes, _reached_at([host]))

    def sign_client(self, key: ec.EllipticCurvePublicKey, name: str, days: int) -> bytes:
        """Return the certificate (PEM) of a client, whose private key stays on its own machine."""
        alternative_name = x509.SubjectAlternativeName([x509.DNSName(name)])
        return self._sign(key, name, days, [ExtendedKeyUsageOID.CLIENT_AUTH], alternative_name)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        days: int,
        purposes: Sequence[x509.ObjectIdentifier],
        names: x509.SubjectAlternativeName,
    ) -> bytes:
        # A certificate must not outlive its authority.
        left = self.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        builder = _builder(_name(name), self.certificate.subject, key, min(days, left.days), signs_certificates=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        for extension in (x509.ExtendedKeyUsage(purposes), names, signer):
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def cluster_authority(signer: AuthorityFiles, cluster: int) -> Authority:
    """Read a cluster's authority; make one if there is none.

    Its certificates are worth nothing in another cluster, and nothing to the edge server.
    """
    files = AuthorityFiles(signer.folder / f"cluster-{cluster}")
    if files.certificate.is_file():
        return Authority.load(files)
    authority = Authority.create(title=f"CollaPipe cluster {cluster}")
    authority.save(files)
    return authority


def forget_cluster_authority(signer: AuthorityFiles, cluster: int) -> None:
    """Remove a cluster's authority, so that the next certificate of the cluster comes from a new one."""
    durable.remove(signer.folder / f"cluster-{cluster}")


def supernode_keys() -> tuple[bytes, bytes]:
    """Make the private and the public key of a SuperNode, in the form that Flower reads (OpenSSH)."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public


def read_certificate(path: Path) -> x509.Certificate:
    """Read the first certificate of a PEM file.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected a certificate (PEM), found something else") from error


def certificate_hosts(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def normal_host(host: str) -> str:
    """Return an address as certificates have it; a name in lower case."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(aside: Path) -> None:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    durable.write_file(path, write, mode=0o600)


def write_public(path: Path, data: bytes) -> None:
    """Write a file that others may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    durable.write_file(path, lambda aside: aside.write_bytes(data))


def read_entries(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if there is no file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _reached_at(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*hosts, *_HERE)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _name(text: str) -> x509.Name:
    # A common name has at most 64 characters; only people read it.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, *, signs_certificates: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=signs_certificates, path_length=0 if signs_certificates else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(usage, critical=True)
        .add_extension(constraints, critical=True)
    )


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
