"""A certificate authority of one's own: it signs the server's and the control units' certificates."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from client_pipeline import durable
from flower_app.deployment.credentials import AuthorityFiles

AUTHORITY_DAYS = 3650
_BACKDATED = datetime.timedelta(hours=1)
"""For machines whose clocks are a little behind."""
_HERE = ("localhost", "127.0.0.1", "::1")
"""A machine's own processes connect to each other there."""


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, days: int = AUTHORITY_DAYS, title: str = "CollaPipe authority") -> Authority:
        """Make a new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(title)
        usage = _usage(signs_certificates=True)
        builder = _builder(name, name, key.public_key(), days).add_extension(usage, critical=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, files: AuthorityFiles) -> Authority:
        """Read one that :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            If a file is missing, is no certificate or key, or the authority has expired.
        """
        files.check()
        certificate = read_certificate(files.certificate)
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{files.key}: expected an elliptic-curve key, as collapipe certs makes it")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise ValueError(
                f"{files.certificate}: the authority expired on {certificate.not_valid_after_utc:%Y-%m-%d}; move its "
                "folder away, run collapipe certs again, and copy the new folders to all machines"
            )
        return cls(certificate, key)

    def save(self, files: AuthorityFiles) -> None:
        """Write certificate and key."""
        write_public(files.certificate, self.pem)
        write_secret(files.key, key_pem(self.key))

    @property
    def pem(self) -> bytes:
        """The certificate, PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue_server(self, hosts: Sequence[str], days: int) -> tuple[bytes, bytes]:
        """Certificate and key of a server that is reached at ``hosts`` (names or addresses), both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        return self._sign(key.public_key(), hosts[0], days, purposes, _reached_at(hosts)), key_pem(key)

    def sign_node(self, key: ec.EllipticCurvePublicKey, host: str, days: int) -> bytes:
        """Certificate (PEM) of a machine that is called at ``host``, and calls others of its cluster."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._sign(key, host, days, purposes, _reached_at([host]))

    def issue_client(self, name: str, days: int) -> tuple[bytes, bytes]:
        """Certificate and key of a client, both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self.sign_client(key.public_key(), name, days), key_pem(key)

    def sign_client(self, key: ec.EllipticCurvePublicKey, name: str, days: int) -> bytes:
        """Certificate (PEM) of a client whose key is somewhere else."""
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
        # No certificate outlives who signed it.
        left = self.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        builder = _builder(_name(name), self.certificate.subject, key, min(days, left.days))
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(names, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def supernode_keys() -> tuple[bytes, bytes]:
    """Private and public key with which a SuperNode says who it is, in the form that Flower reads (OpenSSH)."""
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


def _reached_at(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys((*hosts, *_HERE))])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    # A common name has 64 characters at most; it tells people, and nobody checks it.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
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


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as files have it (PEM), without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
