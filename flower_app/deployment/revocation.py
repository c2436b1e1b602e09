"""Revocation of boxes at the SuperLink and at the decoder's stream.

The authority notes the serial number of every certificate that it issues. A revoked box loses all of them, those too
that a newer one has replaced, and the key of its SuperNode.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from client_pipeline import durable
from flower_app.deployment.certificate_authority import (
    AUTHORITY_DAYS,
    Authority,
    read_certificate,
    read_entries,
    write_public,
)
from flower_app.deployment.credentials import (
    AUTHORITY,
    SERVER,
    AuthorityFiles,
    CuFiles,
    ServerFiles,
    cu_name,
)


def revoke(root: Path, cluster: int, renew: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Take all rights from a cluster's control unit.

    The list that the edge server's programs read is written last: up to then the same can be done again.

    Parameters
    ----------
    root : folder with the authority and the edge server's files
    cluster : of the control unit
    renew : gives the cluster's other boxes another secret, before the control unit loses anything; without it the
        cluster's secret and authority stay

    Returns
    -------
    ``revoked``, its name; ``certificates``, how many it has lost; ``folder``, of the edge server's files.

    Raises
    ------
    FileNotFoundError, ValueError
        If the authority is not there, or has given nothing to such a control unit.
    """
    signer, server = AuthorityFiles(root / AUTHORITY), ServerFiles(root / SERVER)
    name, files = cu_name(cluster), CuFiles(root / cu_name(cluster))
    authority = Authority.load(signer)
    if files.certificate.is_file():
        note_issued(signer, name, read_certificate(files.certificate))
    serials = {int(serial, 16) for serial in read_entries(signer.issued).get(name, [])}
    if not serials:
        raise ValueError(f"--cluster: {signer.folder} has issued no certificate to {name}; see {root} for others")
    renew()
    key_lines = signer.revoked_key_lines()
    if files.supernode_public_key.is_file() and (line := files.supernode_public_key.read_text("utf-8").strip()):
        key_lines = list(dict.fromkeys([*key_lines, line]))
    write_public(signer.revoked_keys, "".join(f"{line}\n" for line in key_lines).encode())
    (server.supernodes / f"{name}.pub").unlink(missing_ok=True)
    durable.remove(files.folder)
    revoke_serials(authority, signer, server, serials)
    return {"revoked": name, "certificates": len(serials), "folder": str(server.folder)}


def revoke_serials(authority: Authority, signer: AuthorityFiles, server: ServerFiles, serials: Iterable[int]) -> None:
    """Add certificates to the list of what is revoked, by their serial numbers."""
    write_public(signer.revoked_certificates, _list(authority, {*serials, *signer.revoked_serials()}))
    publish(authority, signer, server)


def note_issued(signer: AuthorityFiles, name: str, certificate: x509.Certificate) -> None:
    """Note a box's certificate, so that it can be revoked once it is replaced."""
    issued, serial = read_entries(signer.issued), f"{certificate.serial_number:x}"
    if serial not in issued.get(name, []):
        issued[name] = [*issued.get(name, []), serial]
        write_public(signer.issued, (json.dumps(issued, indent=1, sort_keys=True) + "\n").encode())


def publish(authority: Authority, signer: AuthorityFiles, server: ServerFiles) -> None:
    """Copy the lists of revoked certificates and keys into the server's folder; make them if there are none."""
    if not signer.revoked_certificates.is_file():
        write_public(signer.revoked_certificates, _list(authority, ()))
    if signer.revoked_keys.is_file():
        write_public(server.revoked_keys, signer.revoked_keys.read_bytes())
    write_public(server.revoked_certificates, signer.revoked_certificates.read_bytes())


def _list(authority: Authority, serials: Iterable[int]) -> bytes:
    """Sign a certificate revocation list (PEM)."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=AUTHORITY_DAYS))
    for serial in sorted(serials):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
