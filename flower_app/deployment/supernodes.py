"""The SuperLink's register of SuperNodes, made equal to the keys in the server's folder.

``python -m flower_app.deployment.supernodes ADDRESS CA FOLDER`` does it in a process of its own: Flower's client is too
large to stay in memory as long as the machine runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from flower_app.deployment.credentials import ServerFiles

_UNREGISTERED = "unregistered"


def trusted_keys(certs: ServerFiles) -> dict[str, bytes]:
    """Name and public key (PEM) of each SuperNode that may connect: in the folder, and not revoked.

    Raises
    ------
    ValueError
        If a file holds no public key.
    """
    revoked = {key for line in certs.revoked_key_lines() if (key := _public_key(line, certs.revoked_keys))}
    keys = {path.stem: _public_key(path.read_text("utf-8"), path) for path in sorted(certs.supernodes.glob("*.pub"))}
    return {name: key for name, key in keys.items() if key not in revoked}


def _public_key(line: str, path: Path) -> bytes:
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path}: expected public keys in OpenSSH format, found something else") from error
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def align_register(client: Any, keys: Mapping[str, bytes]) -> list[str]:
    """Register the keys that the SuperLink does not know, and unregister all others.

    Returns
    -------
    What was done, one line for each SuperNode.

    Raises
    ------
    ValueError
        If a key was unregistered before: Flower takes none twice.
    """
    from strategies.flower_internals import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest

    lines = []
    nodes = [node for node in client.ListNodes(ListNodesRequest()).nodes_info if node.status != _UNREGISTERED]
    for node in nodes:
        if node.public_key not in keys.values():
            client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
            lines.append(f"{node.name or f'SuperNode {node.node_id}'} may no longer connect")
    registered = {node.public_key for node in nodes}
    for name, key in keys.items():
        if key in registered:
            lines.append(f"{name} may connect, as before")
        else:
            _register(client, name, RegisterNodeRequest(public_key=key, name=name))
            lines.append(f"{name} may connect")
    return lines


def _register(client: Any, name: str, request: Any) -> None:
    import httpx

    try:
        client.RegisterNode(request)
    except httpx.HTTPStatusError as error:
        reason = error.response.text
        raise ValueError(
            f"{name}: the SuperLink does not take its key: {reason}; if it was removed before, let {name} join again: "
            "collapipe revoke, then collapipe join CODE"
        ) from error


def main() -> None:
    """Align the register; prints what was done, or why it was not."""
    address, ca, folder = sys.argv[1:]
    from strategies.flower_internals import ControlHttpClient

    try:
        keys = trusted_keys(ServerFiles(Path(folder)))
        client = ControlHttpClient.from_server_address(address, False, Path(ca).read_bytes(), interceptors=[])
        print("\n".join(align_register(client, keys)))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
