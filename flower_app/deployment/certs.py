"""``collapipe certs``: everything that the machines of a deployment need to know each other, in a folder for each."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from flower_app.deployment import revocation
from flower_app.deployment.authority import Authority, read_certificate, supernode_keys, write_public, write_secret
from flower_app.deployment.cluster_authority import cluster_authority, cluster_authority_files
from flower_app.deployment.credentials import (
    AUTHORITY,
    SERVER,
    AuthorityFiles,
    ClusterFiles,
    CuFiles,
    DeviceFiles,
    ServerFiles,
    cu_name,
    devices_name,
)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class CertsRequest:
    """The command's options."""

    servers: Sequence[str]
    """Names and addresses that the control units may reach the edge server at."""
    clusters: int
    """N."""
    out: Path
    days: int = 365
    renew: bool = False
    """Make new certificates in place of those that are there; authority, SuperNode keys and Ray tokens stay."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("--server: expected the names or addresses of the edge server, found none")
        for host in self.servers:
            if not (_NAME.fullmatch(host) or _is_address(host)):
                raise ValueError(f"--server: expected a name or an address without a port, found {host!r}")
        if self.clusters < 1:
            raise ValueError(f"--clusters: expected at least 1, found {self.clusters}")
        if self.days < 1:
            raise ValueError(f"--days: expected at least 1, found {self.days}")


def make_certificates(request: CertsRequest, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Make what is not there yet; see :mod:`flower_app.deployment.credentials` for the folders.

    Returns
    -------
    ``folder`` of each machine, ``new_files`` (files that are new) and ``expires`` of each certificate.

    Raises
    ------
    ValueError
        If the server's certificate is there already and is for other hosts.
    """
    new_files: list[Path] = []
    authority, signer, server = _edge_server(request, new_files)
    for cluster in range(request.clusters):
        cu = CuFiles(request.out / cu_name(cluster))
        _control_unit(authority, signer, cu, cu_name(cluster), request, new_files)
        write_public(server.supernodes / f"{cu_name(cluster)}.pub", cu.supernode_public_key.read_bytes())
        devices = DeviceFiles(request.out / devices_name(cluster))
        if not devices.ray_token.is_file():
            write_secret(devices.ray_token, cu.ray_token.read_bytes())
            new_files.append(devices.ray_token)
        for files in (cu, devices):
            _cluster(signer, cluster, files, new_files)
    revocation.publish(authority, signer, server)
    certificates = {SERVER: server.certificate} | {
        cu_name(n): CuFiles(request.out / cu_name(n)).certificate for n in range(request.clusters)
    }
    expires = {name: f"{read_certificate(path).not_valid_after_utc:%Y-%m-%d}" for name, path in certificates.items()}
    for name, path in certificates.items():
        say(f"{name}: {path.parent}, valid until {expires[name]}")
    return {"folder": str(request.out), "made": [str(path) for path in new_files], "expires": expires}


def make_server_certificate(request: CertsRequest) -> Authority:
    """Make an authority, and the edge server's own folder, as far as they are not there; no other machine's."""
    authority, signer, server = _edge_server(request, [])
    revocation.publish(authority, signer, server)
    return authority


def _edge_server(request: CertsRequest, new_files: list[Path]) -> tuple[Authority, AuthorityFiles, ServerFiles]:
    signer, server = AuthorityFiles(request.out / AUTHORITY), ServerFiles(request.out / SERVER)
    authority = _authority(signer, new_files)
    _server(authority, server, request, new_files)
    return authority, signer, server


def _authority(files: AuthorityFiles, new_files: list[Path]) -> Authority:
    if files.certificate.is_file() or files.key.is_file():
        return Authority.load(files)
    authority = Authority.create()
    authority.save(files)
    new_files += files.files()
    return authority


def _server(authority: Authority, files: ServerFiles, request: CertsRequest, new_files: list[Path]) -> None:
    if files.certificate.is_file() and not request.renew:
        covered = certificate_hosts(read_certificate(files.certificate))
        if missing := [host for host in request.servers if normal_host(host) not in covered]:
            raise ValueError(
                f"--server: {files.certificate} is there already and is not for {', '.join(missing)}, but for "
                f"{', '.join(covered)}; give --renew to make a new one"
            )
    else:
        certificate, key = authority.issue_server(request.servers, request.days)
        write_public(files.certificate, certificate)
        write_secret(files.key, key)
        new_files += (files.certificate, files.key)
    write_public(files.ca, authority.pem)


def _control_unit(
    authority: Authority,
    signer: AuthorityFiles,
    files: CuFiles,
    name: str,
    request: CertsRequest,
    new_files: list[Path],
) -> None:
    if files.certificate.is_file() and not files.key.is_file() and not files.supernode_key.is_file():
        raise ValueError(
            f"{files.folder}: {name} has joined by a code, and its key is on its own machine; for a new certificate "
            "let it join again: collapipe revoke, collapipe invite"
        )
    if files.certificate.is_file():
        # Those that are replaced stay valid until they expire: who is revoked loses all.
        revocation.note_issued(signer, name, read_certificate(files.certificate))
    if not files.certificate.is_file() or request.renew:
        certificate, key = authority.issue_client(name, request.days)
        write_public(files.certificate, certificate)
        write_secret(files.key, key)
        revocation.note_issued(signer, name, read_certificate(files.certificate))
        new_files += (files.certificate, files.key)
    if not files.supernode_key.is_file():
        private, public = supernode_keys()
        write_secret(files.supernode_key, private)
        write_public(files.supernode_public_key, public + f" {name}\n".encode())
        new_files += (files.supernode_key, files.supernode_public_key)
    if not files.ray_token.is_file():
        write_secret(files.ray_token, secrets.token_hex(32).encode())
        new_files.append(files.ray_token)
    write_public(files.ca, authority.pem)


def _cluster(signer: AuthorityFiles, cluster: int, files: ClusterFiles, new_files: list[Path]) -> None:
    if not files.cluster_key.is_file():
        authority = cluster_authority(signer, cluster)
        write_public(files.cluster_ca, authority.pem)
        write_secret(files.cluster_key, cluster_authority_files(signer, cluster).key.read_bytes())
        new_files += (files.cluster_ca, files.cluster_key)


def normal_host(host: str) -> str:
    """An address as certificates have it; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def certificate_hosts(certificate: x509.Certificate) -> list[str]:
    """Names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]
