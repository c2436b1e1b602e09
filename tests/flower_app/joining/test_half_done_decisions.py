"""A revocation, an approval or a first start that was cut anywhere is done by the same command again."""

import json
import os
import shutil
import ssl

import pytest
from cryptography import x509

from flower_app.deployment.certificate_authority import Authority
from flower_app.deployment.supernodes import trusted_keys
from flower_app.joining.approval import approve_box, revoke_box, revoke_cluster
from flower_app.joining.edge_joining import invite
from flower_app.joining.join_desk import JoinDesk
from flower_app.joining.join_folder import JoinFolder
from flower_app.joining.joined_box import JoiningBox
from flower_app.joining.newcomer import REQUEST
from helpers.cut_writes import calls_that_end
from helpers.joining import edge_folder, joined_by_files

CALLS = ("replace", "unlink", "rmdir")


class Cut(BaseException):
    """The end of a process, which no handler of errors keeps back."""


def cut_at(number, work, monkeypatch):
    """Do the work until the given call that changes a folder; return whether it got so far."""

    def end():
        raise Cut

    with monkeypatch.context() as patch:
        for name, call in calls_that_end(CALLS, number, end).items():
            patch.setattr(os, name, call)
        try:
            work()
        except Cut:
            return True
    return False


def each_cut(template, tmp_path, work, monkeypatch):
    """Yield a copy of the edge server's folder for each call at which the work may be cut."""
    for number in range(1, 100):
        folder = JoinFolder(tmp_path / str(number))
        shutil.copytree(template, folder.root)
        was_cut = cut_at(number, lambda folder=folder: work(folder), monkeypatch)
        yield folder, was_cut
        if not was_cut:
            assert number > 3
            return


def test_a_first_start_of_an_edge_server_that_was_cut_is_done_again(tmp_path, monkeypatch):
    """Half an authority was never completed: each start said that the start itself makes the rest."""
    (tmp_path / "none").mkdir()
    for folder, was_cut in each_cut(tmp_path / "none", tmp_path, lambda folder: edge_folder(folder.root), monkeypatch):
        if was_cut:
            edge_folder(folder.root)
        Authority.load(folder.authority)
        folder.server.check()
        assert folder.server.ca.read_bytes() == folder.authority.certificate.read_bytes()


def test_a_servers_certificate_that_was_half_replaced_is_replaced_at_the_next_start(tmp_path, monkeypatch):
    """The new certificate stood beside the old key, and no start mended that."""
    root = edge_folder(tmp_path / "certs", "old.example").root
    for folder, _ in each_cut(root, tmp_path, lambda folder: edge_folder(folder.root, "new.example"), monkeypatch):
        server = edge_folder(folder.root, "new.example").server
        ssl.create_default_context().load_cert_chain(server.certificate, server.key)


def test_an_authority_that_is_lost_is_not_replaced(tmp_path):
    """Another one would know no box that has joined."""
    folder = edge_folder(tmp_path / "certs")
    folder.authority.certificate.unlink()
    with pytest.raises(FileNotFoundError, match="no file .*authority/ca.pem"):
        edge_folder(folder.root)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Folder of an edge server with a control unit and two devices."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    root = edge_folder(tmp_path / "certs").root
    for name, options in (("cu", {}), ("first", {"cluster": 0}), ("second", {"cluster": 0})):
        joined_by_files(root, tmp_path / name, **options)
    return root


def outcome(folder):
    """Return all that a decision changes, secrets and certificates as far as they fit together."""
    boxes = {box.name: box for box in folder.boxes()}
    members = [box for box in boxes.values() if box.status == "approved"]
    token, authority = folder.root / "devices-0" / "ray-token", folder.root / "authority" / "cluster-0" / "ca.pem"
    for box in members:
        assert box.answer["ray_token"] == token.read_text() and box.answer["cluster_ca"] == authority.read_text()
        node = x509.load_pem_x509_certificate(box.answer["node_certificate"].encode())
        node.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    for box in boxes.values():
        assert box.status == "approved" or not token.exists() or box.answer["ray_token"] != token.read_text()
    paths = {path.relative_to(folder.root) for path in folder.root.rglob("*")}
    files = {str(path) for path in paths if not any(part.startswith(".") for part in path.parts)}
    return {name: box.status for name, box in boxes.items()}, folder.server.revoked_serials(), files


def by_box(name):
    return lambda folder: revoke_box(folder, name)


@pytest.mark.parametrize(
    "revoke",
    [by_box("device-0-0"), by_box("cu-0"), lambda folder: revoke_cluster(folder, 0, lambda _: None)],
    ids=["device", "control unit", "cluster"],
)
def test_a_revocation_that_was_cut_is_done_by_the_same_command_again(cluster, tmp_path, monkeypatch, revoke):
    """The box was revoked, its cluster kept the old secret, and the command said "is revoked already"."""
    whole = JoinFolder(tmp_path / "whole")
    shutil.copytree(cluster, whole.root)
    revoke(whole)
    for folder, was_cut in each_cut(cluster, tmp_path, revoke, monkeypatch):
        if was_cut:
            revoke(folder)
        assert outcome(folder) == outcome(whole)


def test_a_cluster_without_a_box_has_no_secret_that_a_revoked_box_knows(cluster, tmp_path):
    folder = JoinFolder(tmp_path / "certs")
    shutil.copytree(cluster, folder.root)
    secrets = set()
    for name in ("cu-0", "device-0-0", "device-0-1"):
        revoke_box(folder, name)
        secrets |= {box.answer["ray_token"] for box in folder.boxes()}
    again = joined_by_files(folder.root, tmp_path / "again", cluster=0, control_unit=True)
    assert len(secrets) == 3 and again.folder.files.ray_token.read_text() not in secrets


def asking(folder, state, **options):
    """Have a control unit ask in a file, and note its request."""
    state.mkdir()
    invitation = state / "box.invite"
    invitation.write_text(str(invite(folder)[0]))
    box = JoiningBox(code=str(invitation), state=state, host="10.0.0.2", control_unit=True, **options)
    assert box.join(lambda _: None) == {}
    JoinDesk(folder).answer(invitation.with_suffix(REQUEST).read_bytes())


@pytest.fixture(scope="module", params=[-1, 0], ids=["any cluster", "cluster 0"])
def waiting_unit(request, tmp_path_factory):
    """Folder of an edge server that a control unit has asked."""
    tmp_path = tmp_path_factory.mktemp("waiting")
    folder = edge_folder(tmp_path / "certs")
    asking(folder, tmp_path / "cu", cluster=request.param)
    return folder.root


def approve(folder):
    approve_box(folder, folder.boxes()[0].box_id)


def test_an_approval_that_was_cut_is_done_by_the_same_command_again(waiting_unit, tmp_path, monkeypatch):
    """The box's own key took its place: it became cu-1, or was refused as "another machine"."""
    for folder, was_cut in each_cut(waiting_unit, tmp_path, approve, monkeypatch):
        if was_cut:
            approve(folder)
        assert folder.boxes()[0].name == "cu-0" and set(trusted_keys(folder.server)) == {"cu-0"}


def test_a_box_that_is_refused_after_half_an_approval_may_not_connect(waiting_unit, tmp_path, monkeypatch):
    """Its SuperNode's key stayed in the folder that the SuperLink follows."""
    for folder, was_cut in each_cut(waiting_unit, tmp_path, approve, monkeypatch):
        if was_cut:
            revoke_box(folder, folder.boxes()[0].box_id)
            assert folder.boxes()[0].status == "refused" and trusted_keys(folder.server) == {}


def test_to_refuse_a_box_that_shows_anothers_key_takes_nothing_from_the_other(cluster, tmp_path):
    """A SuperNode's public key is no secret, and a request shows no proof of it."""
    folder = JoinFolder(tmp_path / "certs")
    shutil.copytree(cluster, folder.root)
    asking(folder, tmp_path / "thief")
    (thief,) = [box for box in folder.boxes() if box.status == "waiting"]
    (unit,) = [box for box in folder.boxes() if box.name == "cu-0"]
    file = folder.folder / "requests" / f"{thief.token_hash}.json"
    file.write_text(json.dumps(thief.request.to_fields() | {"supernode_key": unit.request.supernode_key}))
    revoke_box(folder, thief.box_id)
    assert set(trusted_keys(folder.server)) == {"cu-0"}
