"""Certificates of a test's own authority, and what the two ends of a stream take of them."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from client_pipeline.link.address import LinkCertificates


def certificate(folder, name, issuer=None, hours=(-1, 1)):
    """Write ``<name>.pem`` and ``<name>.key``, valid between two times from now; without an issuer as its own CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(hours=hours[0]))
        .not_valid_after(now + datetime.timedelta(hours=hours[1]))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.key").write_bytes(encoded)
    return made, key


def service_files(pki, name):
    return {"tls_certificate": str(pki / f"{name}.pem"), "tls_key": str(pki / f"{name}.key")}


def link_certificates(pki, name, **more):
    return LinkCertificates(certificate=str(pki / f"{name}.pem"), key=str(pki / f"{name}.key"), **more)
