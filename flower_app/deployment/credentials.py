"""Which files of certificates and keys each machine has.

::

    authority/        ca.pem, ca.key: signs; issued.json, revoked.pem, revoked.pub; stays with who made it
    authority/cluster-0/    ca.pem, ca.key: signs the machines of cluster 0 for each other
    server/           ca.pem, server.pem, server.key; supernodes/cu-0.pub, ...; revoked.pem, revoked.pub
    cu-0/             ca.pem, cu.pem, cu.key; supernode.key, supernode.pub; ray-token, cluster.pem, cluster.key
    devices-0/        ray-token, cluster.pem, cluster.key: for the devices of cluster 0

A box that joined by a code has cluster.pem and node.pem, its own certificate, in place of cluster.key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AUTHORITY = "authority"
SERVER = "server"


def cu_name(cluster: int) -> str:
    """Name of a control unit: of its folder, and in its certificate."""
    return f"cu-{cluster}"


def devices_name(cluster: int) -> str:
    """Name of the folder for a cluster's devices."""
    return f"devices-{cluster}"


@dataclass(frozen=True)
class _Folder:
    folder: Path

    def files(self) -> Iterator[Path]:
        """All files that have to be there."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ``FileNotFoundError`` naming the first file that is missing."""
        for path in self.files():
            if not path.is_file():
                raise FileNotFoundError(
                    f"--certs: no file {path}; make it with collapipe certs, and copy the whole folder to this machine"
                )


class _RevokedFiles(_Folder):
    """What says who is no longer trusted."""

    @property
    def revoked_certificates(self) -> Path:
        """Revoked certificates of control units: a CRL (PEM) that the authority signed."""
        return self.folder / "revoked.pem"

    @property
    def revoked_keys(self) -> Path:
        """Public keys of SuperNodes that are revoked, one a line; absent as long as there is none."""
        return self.folder / "revoked.pub"

    def revoked_key_lines(self) -> list[str]:
        """The lines of :attr:`revoked_keys`."""
        return self.revoked_keys.read_text(encoding="utf-8").splitlines() if self.revoked_keys.is_file() else []


class AuthorityFiles(_RevokedFiles):
    """Of who signs."""

    @property
    def certificate(self) -> Path:
        """Certificate (PEM)."""
        return self.folder / "ca.pem"

    @property
    def key(self) -> Path:
        """Private key."""
        return self.folder / "ca.key"

    @property
    def issued(self) -> Path:
        """Serial numbers (hexadecimal) of all certificates of each control unit, by its name (JSON)."""
        return self.folder / "issued.json"

    def files(self) -> Iterator[Path]:
        """All files that have to be there."""
        yield from (self.certificate, self.key)


class ServerFiles(_RevokedFiles):
    """Of the edge server: SuperLink and decoder service have the same certificate."""

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """Own certificate."""
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.folder / "server.key"

    @property
    def supernodes(self) -> Path:
        """Folder of the public keys of the SuperNodes that may connect."""
        return self.folder / "supernodes"

    def files(self) -> Iterator[Path]:
        """All files that have to be there."""
        yield from (self.ca, self.certificate, self.key)


class ClusterFiles(_Folder):
    """What the machines of one cluster know each other by."""

    @property
    def ray_token(self) -> Path:
        """Secret that the nodes of the cluster's Ray share."""
        return self.folder / "ray-token"

    @property
    def cluster_ca(self) -> Path:
        """Certificate of the cluster's own authority: whom its machines believe."""
        return self.folder / "cluster.pem"

    @property
    def cluster_key(self) -> Path:
        """Its private key, with which a machine signs a certificate for its own address when it starts."""
        return self.folder / "cluster.key"

    @property
    def node_certificate(self) -> Path:
        """Certificate for this machine's address, of a box that joined by a code."""
        return self.folder / "node.pem"

    @property
    def node_key(self) -> Path:
        """The private key that such a box has made itself."""
        return self.folder / "cu.key"


class CuFiles(ClusterFiles):
    """Of one control unit."""

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """Own certificate: who it is to the decoder."""
        return self.folder / "cu.pem"

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.folder / "cu.key"

    @property
    def supernode_key(self) -> Path:
        """Private key of the SuperNode: who it is to the SuperLink."""
        return self.folder / "supernode.key"

    @property
    def supernode_public_key(self) -> Path:
        """Its public key, which the SuperLink knows."""
        return self.folder / "supernode.pub"

    def files(self) -> Iterator[Path]:
        """All files that have to be there."""
        yield from (self.ca, self.certificate, self.key, self.supernode_key, self.ray_token)


class DeviceFiles(ClusterFiles):
    """Of the devices of one cluster."""

    def files(self) -> Iterator[Path]:
        """All files that have to be there."""
        yield self.ray_token
