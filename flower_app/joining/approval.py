"""Approval and revocation of boxes that join by a code."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline import durable
from client_pipeline.link.hosts import HostPort, is_loopback, plain_host
from flower_app.deployment import revocation
from flower_app.deployment.certificate_authority import (
    CERTIFICATE_DAYS,
    Authority,
    cluster_authority,
    forget_cluster_authority,
    read_certificate,
    write_public,
    write_secret,
)
from flower_app.deployment.credentials import CuFiles, DeviceFiles, cu_name, devices_name
from flower_app.joining.join_desk import JoinDesk
from flower_app.joining.join_folder import APPROVED, REFUSED, WAITING, Box, JoinFolder
from flower_app.joining.join_request import ANY_CLUSTER, MOST_REQUEST_BYTES
from flower_app.joining.newcomer import ANSWER


def approve_box(folder: JoinFolder, box_id: str) -> Box:
    """Sign a box's key, and give it a name and the secrets of its cluster.

    Raises
    ------
    ValueError
        If there is no such box, it does not wait, or its place is taken.
    """
    folder.check()
    with folder.deciding():
        box = folder.find(box_id)
        if box.status != WAITING:
            raise ValueError(f"BOX: {box.box_id} is {box.status} already; a box joins anew by another code")
        authority = Authority.load(folder.authority)
        place = _control_unit if box.is_control_unit else _device
        answer = place(folder, authority, box)
        folder.answer(box.token_hash, {"status": APPROVED, "ca": authority.pem.decode()} | answer)
        return folder.find(box.box_id)


def approve_waiting(folder: JoinFolder) -> Iterator[tuple[Box, str]]:
    """Approve every box that waits, control units first; yield each box with the reason if it is not let in."""
    waiting = [box for box in folder.boxes() if box.status == WAITING]
    for box in sorted(waiting, key=lambda box: not box.is_control_unit):
        try:
            yield approve_box(folder, box.box_id), ""
        except ValueError as error:
            yield box, str(error)


def approve_file(folder: JoinFolder, request_file: Path) -> tuple[Box, Path]:
    """Approve the box of a request file, and write the answer beside it, signed by the authority.

    The lines of both files are those of the joining service. A file of a box that is approved is answered again.

    Returns
    -------
    The box with its name, and the answer file.

    Raises
    ------
    ValueError
        If the file is no request or has the answer's name, its code is not good, or its box cannot be approved.
    """
    folder.check()
    answer_file = request_file.with_suffix(ANSWER)
    durable.check_not_input("--file", answer_file, request_file)
    with request_file.open("rb") as file:
        line = file.read(MOST_REQUEST_BYTES + 1)
    desk = JoinDesk(folder)
    try:
        answer = desk.answer(line)
        if answer.get("status") == WAITING:
            approve_box(folder, str(answer["box"]))
            answer = desk.answer(line)
    except ValueError as error:
        raise ValueError(f"{request_file}: {error}") from error
    if answer.get("status") != APPROVED:
        raise ValueError(f"{request_file}: expected the request of a box, found one that is {answer.get('status')}")
    signed = json.dumps(answer).encode()
    signature = Authority.load(folder.authority).key.sign(signed, ec.ECDSA(hashes.SHA256()))
    write_secret(answer_file, signed + b"\n" + base64.b64encode(signature) + b"\n")
    return folder.find(str(answer["name"])), answer_file


def revoke_box(folder: JoinFolder, box_id: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Refuse a box that waits, or take all rights from one that has joined.

    Its cluster's new secret comes first. The last write revokes the box: up to then the same can be done again.

    Returns
    -------
    ``revoked``, its name or id; ``certificates``, the number that it has lost.
    """
    folder.check()
    with folder.deciding():
        box = folder.find(box_id)
        if box.status == WAITING:
            for path in _keys_of_a_half_approval(folder, box):
                path.unlink()
            folder.answer(box.token_hash, {"status": REFUSED})
            say(f"{box.box_id} is refused; it gets no certificate")
            return {"revoked": box.box_id, "certificates": 0}
        if box.status != APPROVED:
            raise ValueError(f"BOX: {box.box_id} is {box.status} already")
        if box.is_control_unit:
            return _revoke_control_unit(folder, box.cluster, say)
        authority = Authority.load(folder.authority)
        others = _renew_cluster(folder, box.cluster, box.name)
        serials = {int(box.answer["serial"], 16)}
        revocation.revoke_serials(authority, folder.authority, folder.server, serials)
    say(
        f"{box.name} is revoked; {', '.join(others) or 'no other box'} of its cluster start again within seconds, with "
        "a secret and certificates that it does not have"
    )
    return {"revoked": box.name, "certificates": len(serials)}


def revoke_cluster(folder: JoinFolder, cluster: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Take all rights from a cluster's control unit, and give the cluster's boxes other secrets."""
    with folder.deciding():
        return _revoke_control_unit(folder, cluster, say)


def _revoke_control_unit(folder: JoinFolder, cluster: int, say: Callable[[str], None]) -> dict[str, Any]:
    others: list[str] = []
    name = cu_name(cluster)
    revoked = revocation.revoke(folder.root, cluster, lambda: others.extend(_renew_cluster(folder, cluster, name)))
    say(
        f"{revoked['revoked']} is revoked: an edge server on this machine refuses it from now on; to another machine "
        f"copy {revoked['folder']}, and start the edge server there again"
    )
    if others:
        say(
            f"{', '.join(others)} of its cluster start again within seconds, with a secret and certificates that it "
            "does not have, and wait for another control unit of this cluster"
        )
    return revoked


def _control_unit(folder: JoinFolder, authority: Authority, box: Box) -> dict[str, Any]:
    cluster = _free_cluster(folder, box)
    name = cu_name(cluster)
    for path in _keys_of_a_half_approval(folder, box):
        if path.stem != name:
            path.unlink()
    public = CuFiles(folder.root / name)
    secret = DeviceFiles(folder.root / devices_name(cluster)).ray_token
    # Boxes of an earlier, revoked control unit have this secret already.
    if not secret.is_file():
        write_secret(secret, secrets.token_hex(32).encode())
    # Its public files are enough to revoke it.
    write_public(public.supernode_public_key, box.request.supernode_line(name))
    answer = _answer(folder, authority, box, name, cluster, public.certificate)
    write_public(folder.server.supernodes / f"{name}.pub", box.request.supernode_line(name))
    revocation.publish(authority, folder.authority, folder.server)
    _tell(folder, _members(folder, cluster), cu=_address(box))
    return answer | {"devices": list(box.request.devices)}


def _device(folder: JoinFolder, authority: Authority, box: Box) -> dict[str, Any]:
    cluster = box.request.cluster
    members = _members(folder, cluster)
    control_unit = next((other for other in members if other.is_control_unit), None)
    if control_unit is None:
        raise ValueError(f"BOX: cluster {cluster} has no control unit that joined by a code yet; approve one first")
    taken = {device for other in members for device in other.devices}
    if clash := taken & set(box.request.devices):
        raise ValueError(f"BOX: cluster {cluster} has a device {min(clash)} already; revoke its box first")
    devices = list(box.request.devices) or [next(n for n in range(len(taken) + 1) if n not in taken)]
    name = f"device-{cluster}-{devices[0]}"
    certificate_file = folder.folder / "certificates" / f"{name}.pem"
    answer = _answer(folder, authority, box, name, cluster, certificate_file)
    return answer | {"devices": devices, "cu": _address(control_unit)}


def _answer(
    folder: JoinFolder, authority: Authority, box: Box, name: str, cluster: int, certificate_file: Path
) -> dict[str, Any]:
    """Sign a box's key for its name, keep and note the certificate; return the answer to the box."""
    write_public(certificate_file, authority.sign_client(box.request.public_key, name, CERTIFICATE_DAYS))
    certificate = read_certificate(certificate_file)
    revocation.note_issued(folder.authority, name, certificate)
    return {
        "name": name,
        "cluster": cluster,
        "certificate": certificate_file.read_text(encoding="ascii"),
        "serial": f"{certificate.serial_number:x}",
        **_cluster_trust(folder, box, cluster),
    }


def _cluster_trust(folder: JoinFolder, box: Box, cluster: int) -> dict[str, str]:
    """Make a box's certificate within its cluster; return it with the cluster's authority and secret."""
    signer = cluster_authority(folder.authority, cluster)
    return {
        "ray_token": DeviceFiles(folder.root / devices_name(cluster)).ray_token.read_text(encoding="ascii"),
        "cluster_ca": signer.pem.decode(),
        "node_certificate": signer.sign_node(
            box.request.public_key, box.request.host.strip("[]"), CERTIFICATE_DAYS
        ).decode(),
    }


def _renew_cluster(folder: JoinFolder, cluster: int, revoked: str) -> list[str]:
    """Give a cluster another authority and secret, which the revoked box does not get; return the names of the others.

    A cluster without another box keeps neither.
    """
    others = [box for box in _members(folder, cluster) if box.name != revoked]
    secret = DeviceFiles(folder.root / devices_name(cluster)).ray_token
    forget_cluster_authority(folder.authority, cluster)
    if others:
        write_secret(secret, secrets.token_hex(32).encode())
    else:
        durable.remove(secret.parent)
    _tell(folder, others)
    return [box.name for box in others]


def _tell(folder: JoinFolder, members: Iterable[Box], **more: str) -> None:
    """Answer boxes with the present authority and secret of their cluster."""
    for box in members:
        folder.answer(box.token_hash, {**box.answer, **_cluster_trust(folder, box, box.cluster), **more})


def _members(folder: JoinFolder, cluster: int) -> list[Box]:
    return [box for box in folder.boxes() if box.status == APPROVED and box.cluster == cluster]


def _address(control_unit: Box) -> str:
    """Return the address at which the devices of a cluster reach the Ray of its control unit."""
    return str(HostPort(control_unit.request.host, control_unit.request.ray_port))


def _keys_of_a_half_approval(folder: JoinFolder, box: Box) -> list[Path]:
    """Return the SuperNode keys in the server's folder that a waiting box has from an approval that did not end."""
    names = {other.name for other in folder.boxes() if other.status == APPROVED}
    keys = [path for path in folder.server.supernodes.glob("*.pub") if path.stem not in names]
    return [path for path in keys if box.is_control_unit and path.read_bytes() == box.request.supernode_line(path.stem)]


def _free_cluster(folder: JoinFolder, box: Box) -> int:
    keys = {*folder.server.supernodes.glob("*.pub")} - {*_keys_of_a_half_approval(folder, box)}
    taken = {path.stem for path in keys} | {other.name for other in folder.boxes() if other.status == APPROVED}
    asked = box.request.cluster
    if asked == ANY_CLUSTER:
        return next(n for n in range(len(taken) + 1) if cu_name(n) not in taken)
    if cu_name(asked) in taken:
        raise ValueError(
            f"BOX: {cu_name(asked)} is another machine; collapipe revoke --cluster {asked} takes its rights, or let "
            "this one join without --cluster"
        )
    return asked


def shared_address_warning(folder: JoinFolder, box: Box) -> str:
    """Warn of a box with the address of another one of its cluster; empty if there is none, and on the loopback."""
    host = plain_host(box.request.host)
    same = [other.name for other in _members(folder, box.cluster) if plain_host(other.request.host) == host]
    others = [name for name in same if name != box.name]
    if not others or is_loopback(box.request.host):
        return ""
    return (
        f"warning: {box.name} has the address of {', '.join(others)}, {box.request.host}, and can stand for it; unless "
        f"they are one machine: collapipe revoke --box {box.box_id}"
    )


def boxes_table(folder: JoinFolder) -> list[dict[str, Any]]:
    """Return a row of ``collapipe boxes`` for each box."""
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
