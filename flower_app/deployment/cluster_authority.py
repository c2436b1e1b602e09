"""The authority of one cluster, which its machines alone believe, and a machine's certificate by it.

No certificate of a cluster is worth anything in another one, or to who asks for the edge server.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.runtime.node_tls import NodeTls
from flower_app.deployment.authority import Authority, key_pem, write_public, write_secret
from flower_app.deployment.credentials import AuthorityFiles, ClusterFiles

NODE_DAYS = 365
"""How long the certificate is valid that a machine signs for itself, anew at each start."""
_FOLDER = "tls"


def cluster_authority_files(signer: AuthorityFiles, cluster: int) -> AuthorityFiles:
    """Where the authority of a cluster is kept, beside that of the deployment."""
    return AuthorityFiles(signer.folder / f"cluster-{cluster}")


def cluster_authority(signer: AuthorityFiles, cluster: int) -> Authority:
    """Read a cluster's authority; made if there is none."""
    files = cluster_authority_files(signer, cluster)
    if files.certificate.is_file() or files.key.is_file():
        return Authority.load(files)
    authority = Authority.create(title=f"CollaPipe cluster {cluster}")
    authority.save(files)
    return authority


def forget_cluster_authority(signer: AuthorityFiles, cluster: int) -> None:
    """Remove a cluster's authority: the next one signs nobody who is not asked for anew."""
    shutil.rmtree(cluster_authority_files(signer, cluster).folder, ignore_errors=True)


def node_tls(files: ClusterFiles, host: str, temp: Path) -> NodeTls | None:
    """A machine's certificate within its cluster.

    Parameters
    ----------
    files : the machine's folder
    host : address at which the others of its cluster reach it
    temp : gets a certificate that is signed here; see :func:`forget_node_key`

    Returns
    -------
    None where the folder has nothing of a cluster's authority: an older release made it.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or is no certificate or key, or the authority has expired.
    """
    if not files.cluster_ca.is_file():
        return None
    if not files.cluster_key.is_file():
        if not files.node_certificate.is_file():
            raise FileNotFoundError(
                f"--certs: {files.cluster_ca} is there, and neither {files.cluster_key} nor {files.node_certificate}; "
                "copy the whole folder to this machine"
            )
        return NodeTls(
            certificate=files.node_certificate, key=files.node_key, authority=files.cluster_ca, host=host.strip("[]")
        )
    authority = Authority.load(_ClusterSigner(files.folder))
    key = ec.generate_private_key(ec.SECP256R1())
    node = NodeTls(
        certificate=temp / _FOLDER / "node.pem",
        key=temp / _FOLDER / "node.key",
        authority=files.cluster_ca,
        host=host.strip("[]"),
    )
    write_public(node.certificate, authority.sign_node(key.public_key(), node.host, NODE_DAYS))
    write_secret(node.key, key_pem(key))
    return node


def forget_node_key(temp: Path) -> None:
    """Remove what :func:`node_tls` has written."""
    shutil.rmtree(temp / _FOLDER, ignore_errors=True)


class _ClusterSigner(AuthorityFiles):
    """The copy of a cluster's authority in a machine's folder."""

    @property
    def certificate(self) -> Path:
        """Certificate (PEM)."""
        return self.folder / "cluster.pem"

    @property
    def key(self) -> Path:
        """Private key."""
        return self.folder / "cluster.key"
