"""``collapipe revoke``: a control unit that is no longer trusted, at the SuperLink and at the decoder's stream.

The authority notes the serial number of every certificate that it gives a control unit. Who is revoked loses all of
them, those too that a newer one has replaced, and the key of its SuperNode.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from flower_app.deployment.authority import AUTHORITY_DAYS, Authority, read_certificate, write_public
from flower_app.deployment.cluster_authority import forget_cluster_authority
from flower_app.deployment.credentials import (
    AUTHORITY,
    SERVER,
    AuthorityFiles,
    CuFiles,
    DeviceFiles,
    ServerFiles,
    cu_name,
    devices_name,
)


def revoke(out: Path, cluster: int, say: Callable[[str], None] = lambda _: None, remedy: str = "") -> dict[str, Any]:
    """Take all rights from a cluster's control unit.

    Parameters
    ----------
    out : folder that ``collapipe certs`` made, with the authority
    cluster : whose control unit
    say : told what to do next
    remedy : instead of copying the folder to the edge server

    Returns
    -------
    ``revoked``, its name; ``certificates``, how many it has lost; ``folder``, which goes to the edge server.

    Raises
    ------
    FileNotFoundError, ValueError
        If the authority is not there, or has given nothing to such a control unit.
    """
    signer, server = AuthorityFiles(out / AUTHORITY), ServerFiles(out / SERVER)
    name, files, devices = cu_name(cluster), CuFiles(out / cu_name(cluster)), DeviceFiles(out / devices_name(cluster))
    authority = Authority.load(signer)
    if files.certificate.is_file():
        note_issued(signer, name, read_certificate(files.certificate))
    serials = {int(serial, 16) for serial in _issued(signer).get(name, [])}
    if not serials:
        raise ValueError(f"--cluster: {signer.folder} has issued no certificate to {name}; see {out} for others")
    key_lines = signer.revoked_key_lines()
    if files.supernode_public_key.is_file() and (line := files.supernode_public_key.read_text("utf-8").strip()):
        key_lines = list(dict.fromkeys([*key_lines, line]))
    write_public(signer.revoked_keys, "".join(f"{line}\n" for line in key_lines).encode())
    revoke_serials(authority, signer, server, serials)
    (server.supernodes / f"{name}.pub").unlink(missing_ok=True)
    # Its identity is worth nothing any more; collapipe certs makes the cluster another.
    shared = [path for member in (files, devices) for path in (member.cluster_ca, member.cluster_key)]
    for path in (*files.files(), files.supernode_public_key, *devices.files(), *shared):
        path.unlink(missing_ok=True)
    forget_cluster_authority(signer, cluster)
    for folder in (files.folder, devices.folder):
        with contextlib.suppress(OSError):
            folder.rmdir()
    copy = f"copy {server.folder} to the edge server and start it again: collapipe up edge-server"
    say(f"{name} is revoked; {remedy or copy}")
    return {"revoked": name, "certificates": len(serials), "folder": str(server.folder)}


def revoke_serials(authority: Authority, signer: AuthorityFiles, server: ServerFiles, serials: Iterable[int]) -> None:
    """Add certificates to the list of what is revoked, by their serial numbers."""
    write_public(signer.revoked_certificates, _list(authority, {*serials, *_revoked_serials(signer)}))
    publish(authority, signer, server)


def note_issued(signer: AuthorityFiles, name: str, certificate: x509.Certificate) -> None:
    """Note a control unit's certificate, so that it can be revoked once it is replaced."""
    issued, serial = _issued(signer), f"{certificate.serial_number:x}"
    if serial not in issued.get(name, []):
        issued[name] = [*issued.get(name, []), serial]
        write_public(signer.issued, (json.dumps(issued, indent=1, sort_keys=True) + "\n").encode())


def publish(authority: Authority, signer: AuthorityFiles, server: ServerFiles) -> None:
    """Give the server's folder the lists of what is revoked; empty ones at first."""
    if not signer.revoked_certificates.is_file():
        write_public(signer.revoked_certificates, _list(authority, ()))
    write_public(server.revoked_certificates, signer.revoked_certificates.read_bytes())
    if signer.revoked_keys.is_file():
        write_public(server.revoked_keys, signer.revoked_keys.read_bytes())


def _issued(signer: AuthorityFiles) -> dict[str, list[str]]:
    return dict(json.loads(signer.issued.read_text(encoding="utf-8"))) if signer.issued.is_file() else {}


def _revoked_serials(signer: AuthorityFiles) -> set[int]:
    if not signer.revoked_certificates.is_file():
        return set()
    revoked = x509.load_pem_x509_crl(signer.revoked_certificates.read_bytes())
    return {entry.serial_number for entry in revoked}


def _list(authority: Authority, serials: Iterable[int]) -> bytes:
    """A certificate revocation list (PEM)."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=AUTHORITY_DAYS))
    for serial in sorted(serials):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
