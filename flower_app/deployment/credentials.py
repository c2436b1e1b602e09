"""Files of certificates and keys on each machine.

::

    authority/              ca.pem, ca.key: signs; issued.json, revoked.pem, revoked.pub
    authority/cluster-0/    ca.pem, ca.key: signs the machines of cluster 0 for each other
    server/                 ca.pem, server.pem, server.key; supernodes/cu-0.pub, ...; revoked.pem, revoked.pub
    cu-0/                   cu.pem, supernode.pub: the public files of cluster 0's control unit, enough to revoke it
    devices-0/              ray-token: the secret of cluster 0's Ray

These folders lie on the edge server. A box has its own files in ``STATE/joined``; it makes its private keys itself.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

AUTHORITY = "authority"
SERVER = "server"


def cu_name(cluster: int) -> str:
    """Name a control unit: its folder, its certificate and its SuperNode."""
    return f"cu-{cluster}"


def devices_name(cluster: int) -> str:
    """Name the folder with the secret of a cluster's Ray."""
    return f"devices-{cluster}"


class _Folder:
    """Folder with files of which some are required."""

    remedy = "--certs: no file {path}; collapipe up edge-server --name HOST makes it"
    required: tuple[Path, ...]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self) -> None:
        """Raise ``FileNotFoundError`` naming the first file that is missing."""
        for path in self.required:
            if not path.is_file():
                raise FileNotFoundError(self.remedy.format(path=path))


class _RevokedFiles(_Folder):
    """Lists of revoked certificates and keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.revoked_certificates = folder / "revoked.pem"
        """Revoked certificates of boxes: a CRL (PEM) that the authority signed."""
        self.revoked_keys = folder / "revoked.pub"
        """Public keys of revoked SuperNodes, one a line; absent as long as there is none."""

    def revoked_key_lines(self) -> list[str]:
        """Return the lines of :attr:`revoked_keys`."""
        return self.revoked_keys.read_text(encoding="utf-8").splitlines() if self.revoked_keys.is_file() else []

    def revoked_serials(self) -> set[int]:
        """Return the serial numbers of :attr:`revoked_certificates`."""
        path = self.revoked_certificates
        return {entry.serial_number for entry in x509.load_pem_x509_crl(path.read_bytes())} if path.is_file() else set()


class AuthorityFiles(_RevokedFiles):
    """Files of the authority."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.certificate, self.key = folder / "ca.pem", folder / "ca.key"
        self.issued = folder / "issued.json"
        """Serial numbers (hexadecimal) of all certificates of each box, by its name (JSON)."""
        self.required = (self.certificate, self.key)


class ServerFiles(_RevokedFiles):
    """Files of the edge server, whose SuperLink and decoder service share a certificate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ca = folder / "ca.pem"
        """Certificate of the authority."""
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.supernodes = folder / "supernodes"
        """Folder of the public keys of the SuperNodes that may connect."""
        self.required = (self.ca, self.certificate, self.key)


class DeviceFiles(_Folder):
    """Files of a box that has joined, a control unit's SuperNode excepted."""

    remedy = "--state: no file {path}; let this box join again: collapipe join CODE"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ca = folder / "ca.pem"
        """Certificate of the deployment's authority."""
        self.certificate = folder / "cu.pem"
        """Certificate by which the edge server knows the box."""
        self.key = folder / "cu.key"
        """Private key of both certificates of the box."""
        self.cluster_ca = folder / "cluster.pem"
        """Certificate of the cluster's authority, the only one that its machines believe."""
        self.node_certificate = folder / "node.pem"
        """Certificate of the box within its cluster, for its address."""
        self.ray_token = folder / "ray-token"
        """Secret of the cluster's Ray."""
        self.required = (
            *(self.ca, self.certificate, self.key),
            *(self.cluster_ca, self.node_certificate, self.ray_token),
        )


class CuFiles(DeviceFiles):
    """Files of a control unit that has joined."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.supernode_key = folder / "supernode.key"
        """Private key of the SuperNode, by which the SuperLink knows it."""
        self.supernode_public_key = folder / "supernode.pub"
        self.required = (*self.required, self.supernode_key)
