"""Certificates that no longer open the decoder's stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa


class RevokedCertificates:
    """Certificate revocation list, read anew for each stream, so that a changed file takes effect at once.

    Parameters
    ----------
    path : PEM file; ``decoder.tls-crl``
    ca : the authority's certificate (PEM), which must have signed the list

    Raises
    ------
    ValueError
        If the file is no such list.
    """

    def __init__(self, path: str, ca: bytes) -> None:
        self._path = Path(path)
        self._authority = x509.load_pem_x509_certificate(ca)
        self._read()

    def check(self, peer: Mapping[str, Sequence[bytes]]) -> None:
        """Check the certificate of a stream's peer.

        Parameters
        ----------
        peer : gRPC's properties of the other end (``ServicerContext.auth_context``)

        Raises
        ------
        PermissionError
            If the certificate is revoked, there is none, or the list cannot be read any more.
        """
        certificates = peer.get("x509_pem_cert", ())
        if not certificates:
            raise PermissionError("this stream has no certificate; give the control unit its own")
        serial = x509.load_pem_x509_certificate(certificates[0]).serial_number
        try:
            revoked = self._read().get_revoked_certificate_by_serial_number(serial) is not None
        except ValueError as error:
            raise PermissionError("the server cannot tell which certificates are revoked") from error
        if revoked:
            raise PermissionError("the certificate of this control unit is revoked")

    def _read(self) -> x509.CertificateRevocationList:
        try:
            revoked = x509.load_pem_x509_crl(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"decoder.tls-crl {self._path}: expected a certificate revocation list (PEM), found none; "
                "collapipe up edge-server writes revoked.pem into the server's folder"
            ) from error
        key = self._authority.public_key()
        signers = (ec.EllipticCurvePublicKey, rsa.RSAPublicKey, ed25519.Ed25519PublicKey, ed448.Ed448PublicKey)
        if not (isinstance(key, signers) and revoked.is_signature_valid(key)):
            raise ValueError(
                f"decoder.tls-crl {self._path}: expected a list that the authority of decoder.tls-ca signed, found "
                "another's; take both from one edge server's folder"
            )
        return revoked
