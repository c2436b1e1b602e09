"""``collapipe approve`` and what ``collapipe revoke`` does to a box that has joined by a code."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from client_pipeline.link.hosts import HostPort
from flower_app.deployment import revocation
from flower_app.deployment.authority import Authority, read_certificate, write_public, write_secret
from flower_app.deployment.cluster_authority import cluster_authority, forget_cluster_authority
from flower_app.deployment.credentials import CuFiles, DeviceFiles, cu_name, devices_name
from flower_app.joining.join_folder import APPROVED, REFUSED, WAITING, Box, JoinFolder
from flower_app.joining.join_request import ANY_CLUSTER

CERTIFICATE_DAYS = 365


def approve_box(folder: JoinFolder, box_id: str, days: int = CERTIFICATE_DAYS) -> Box:
    """Sign a box's key, and give it a name and what its cluster shares.

    Parameters
    ----------
    folder : the edge server's
    box_id : beginning of the id that ``collapipe boxes`` shows
    days : how long its certificate is valid

    Returns
    -------
    The box with its name.

    Raises
    ------
    ValueError
        If there is no such box, it is decided about, or its place is taken.
    """
    folder.check()
    with folder.deciding():
        box = folder.find(box_id)
        if box.status != WAITING:
            raise ValueError(f"BOX: {box.box_id} is {box.status} already; a box joins anew by another code")
        authority = Authority.load(folder.authority)
        place = _control_unit if box.is_control_unit else _device
        answer = place(folder, authority, box, days)
        folder.answer(box.token_hash, {"status": APPROVED, "ca": authority.pem.decode()} | answer)
        return folder.find(box.box_id)


def revoke_box(folder: JoinFolder, box_id: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Refuse a box that waits, or take all rights from one that has joined.

    Returns
    -------
    ``revoked``, its name or id; ``certificates``, how many it has lost.
    """
    folder.check()
    with folder.deciding():
        box = folder.find(box_id)
        if box.status == WAITING:
            folder.answer(box.token_hash, {"status": REFUSED})
            say(f"{box.box_id} is refused; it gets no certificate")
            return {"revoked": box.box_id, "certificates": 0}
        if box.status != APPROVED:
            raise ValueError(f"BOX: {box.box_id} is {box.status} already")
        if box.is_control_unit:
            return revocation.revoke(folder.root, box.cluster, say, SEEN_BY_ITSELF)
        authority = Authority.load(folder.authority)
        serials = {int(box.answer["serial"], 16)}
        revocation.revoke_serials(authority, folder.authority, folder.server, serials)
        others = _renew_cluster(folder, box.cluster)
    say(
        f"{box.name} is revoked; {', '.join(others) or 'no other box'} of its cluster start again within seconds, with "
        "a secret and certificates that it does not have"
    )
    return {"revoked": box.name, "certificates": len(serials)}


SEEN_BY_ITSELF = "the edge server refuses it from now on, without a restart"


def _control_unit(folder: JoinFolder, authority: Authority, box: Box, days: int) -> dict[str, Any]:
    cluster = _free_cluster(folder, box)
    name = cu_name(cluster)
    public = CuFiles(folder.root / name)
    secret = DeviceFiles(folder.root / devices_name(cluster)).ray_token
    write_secret(secret, secrets.token_hex(32).encode())
    certificate = authority.sign_client(box.request.public_key, name, days)
    # The folder has what is public of it alone: enough to revoke it.
    write_public(public.certificate, certificate)
    write_public(public.supernode_public_key, box.request.supernode_line(name))
    read = read_certificate(public.certificate)
    revocation.note_issued(folder.authority, name, read)
    write_public(folder.server.supernodes / f"{name}.pub", box.request.supernode_line(name))
    revocation.publish(authority, folder.authority, folder.server)
    return {
        "name": name,
        "cluster": cluster,
        "devices": list(box.request.devices),
        "certificate": certificate.decode(),
        "serial": f"{read.serial_number:x}",
        **_cluster_trust(folder, box, cluster, days),
    }


def _device(folder: JoinFolder, authority: Authority, box: Box, days: int) -> dict[str, Any]:
    cluster = box.request.cluster
    members = [other for other in folder.boxes() if other.status == APPROVED and other.cluster == cluster]
    control_unit = next((other for other in members if other.is_control_unit), None)
    if control_unit is None:
        raise ValueError(f"BOX: cluster {cluster} has no control unit that joined by a code yet; approve one first")
    taken = {device for other in members for device in other.devices}
    if clash := taken & set(box.request.devices):
        raise ValueError(f"BOX: cluster {cluster} has a device {min(clash)} already; revoke its box first")
    devices = list(box.request.devices) or [next(n for n in range(len(taken) + 1) if n not in taken)]
    name = f"device-{cluster}-{devices[0]}"
    certificate = authority.sign_client(box.request.public_key, name, days)
    certificate_file = folder.folder / "certificates" / f"{name}.pem"
    write_public(certificate_file, certificate)
    read = read_certificate(certificate_file)
    revocation.note_issued(folder.authority, name, read)
    return {
        "name": name,
        "cluster": cluster,
        "devices": devices,
        "certificate": certificate.decode(),
        "serial": f"{read.serial_number:x}",
        **_cluster_trust(folder, box, cluster, days),
        "cu": str(HostPort(control_unit.request.host, control_unit.request.ray_port)),
    }


def _cluster_trust(folder: JoinFolder, box: Box, cluster: int, days: int) -> dict[str, str]:
    """What a box shows the others of its cluster, and what it believes them by."""
    signer = cluster_authority(folder.authority, cluster)
    return {
        "ray_token": DeviceFiles(folder.root / devices_name(cluster)).ray_token.read_text(encoding="ascii"),
        "cluster_ca": signer.pem.decode(),
        "node_certificate": signer.sign_node(box.request.public_key, box.request.host.strip("[]"), days).decode(),
    }


def _renew_cluster(folder: JoinFolder, cluster: int) -> list[str]:
    """Give the boxes of a cluster another authority and another secret, which who was revoked does not get.

    Returns
    -------
    Names of the boxes.
    """
    forget_cluster_authority(folder.authority, cluster)
    write_secret(DeviceFiles(folder.root / devices_name(cluster)).ray_token, secrets.token_hex(32).encode())
    members = [box for box in folder.boxes() if box.status == APPROVED and box.cluster == cluster]
    for box in members:
        trust = _cluster_trust(folder, box, cluster, CERTIFICATE_DAYS)
        folder.answer(box.token_hash, {**box.answer, **trust})
    return [box.name for box in members]


def _free_cluster(folder: JoinFolder, box: Box) -> int:
    taken = {path.stem for path in folder.server.supernodes.glob("*.pub")}
    asked = box.request.cluster
    if asked == ANY_CLUSTER:
        return next(n for n in range(len(taken) + 1) if cu_name(n) not in taken)
    if cu_name(asked) in taken:
        raise ValueError(
            f"BOX: {cu_name(asked)} is another machine; collapipe revoke --cluster {asked} takes its rights, or let "
            "this one join without --cluster"
        )
    return asked


def boxes_table(folder: JoinFolder) -> list[dict[str, Any]]:
    """What ``collapipe boxes`` shows of each box."""
    return [
        {
            "box": box.box_id,
            "status": box.status,
            "name": box.name,
            "kind": box.request.kind,
            "cluster": None if box.cluster == ANY_CLUSTER else box.cluster,
            "devices": box.devices,
            "host": box.request.host,
        }
        for box in folder.boxes()
    ]
