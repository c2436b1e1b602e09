"""Boxes join by a code: who gets a certificate, and who is refused."""

import contextlib
import errno
import json
import os
import ssl
import stat
import threading
import time

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from client_pipeline.durable import Disk
from client_pipeline.link.hosts import HostPort
from flower_app.deployment.supernodes import trusted_keys
from flower_app.joining.approval import approve_box, revoke_box
from flower_app.joining.edge_joining import EdgeJoining
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_service import JoinService
from flower_app.joining.joined_box import JoiningBox, MembershipWatch, machine_of
from flower_app.joining.newcomer import BoxFolder, JoinRefused, join_deployment
from flower_app.joining.registrar import approve_waiting, trusted_state
from helpers.joining import HOST, JoiningThread, joined, joined_by_files, waiting, wish
from helpers.patience import eventually


def test_a_control_unit_gets_a_certificate_for_a_key_that_never_left_it(server, tmp_path):
    thread = JoiningThread(tmp_path / "box", server.code(), wish())
    (box,) = waiting(server)
    # Nothing is signed before somebody has looked; both sides show the same id.
    assert not (tmp_path / "box" / "cu.pem").exists() and thread.box is None
    approve_box(server.folder, box.box_id[:6])
    files = thread.done().folder.files
    assert thread.error is None and box.box_id in thread.words[0]
    assert (thread.box["name"], thread.box["cluster"]) == ("cu-0", 0)
    files.check()
    # OpenSSL takes certificate and key together, and the authority's for the server's and the box's.
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    authority = x509.load_pem_x509_certificate(files.ca.read_bytes())
    x509.load_pem_x509_certificate(files.certificate.read_bytes()).verify_directly_issued_by(authority)
    kept = b"".join(path.read_bytes() for path in server.root.rglob("*") if path.is_file())
    for key in (files.key, files.supernode_key):
        assert key.read_bytes().splitlines()[1] not in kept
    # What the SuperLink is told is the SuperNode's key.
    public = serialization.load_ssh_private_key(files.supernode_key.read_bytes(), None).public_key()
    spki = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert trusted_keys(server.folder.server) == {"cu-0": public.public_bytes(*spki)}


def test_a_device_joins_the_cluster_of_its_control_unit(server, tmp_path):
    unit = joined(server, tmp_path / "cu", wish(devices=[0], ray_port=7000))
    first = joined(server, tmp_path / "first", wish("device", 0, host="10.0.0.3"))
    second = joined(server, tmp_path / "second", wish("device", 0, host="10.0.0.4"))
    assert [thread.box["devices"] for thread in (unit, first, second)] == [[0], [1], [2]]
    assert {thread.box["cu"] for thread in (first, second)} == {"10.0.0.2:7000"}
    secrets = {thread.folder.files.ray_token.read_bytes() for thread in (unit, first, second)}
    assert len(secrets) == 1 and len(secrets.pop()) == 64


@pytest.mark.parametrize(("taken", "free"), [([0, 2], 1), ([1], 0), ([2, 0, 3], 1), ([0, 1], 2), ([5], 0)], ids=str)
def test_a_device_without_a_number_gets_the_first_that_is_free(server, tmp_path, taken, free):
    """Gaps are there where devices named their own numbers, or were revoked."""
    joined(server, tmp_path / "cu", wish(devices=taken))
    device = joined(server, tmp_path / "device", wish("device", 0, host="10.0.0.3"))
    assert (device.box["name"], device.box["devices"]) == (f"device-0-{free}", [free])


def test_a_number_that_a_revoked_box_had_is_free_again(server, tmp_path):
    joined(server, tmp_path / "cu", wish())
    first = joined(server, tmp_path / "first", wish("device", 0, host="10.0.0.3"))
    second = joined(server, tmp_path / "second", wish("device", 0, host="10.0.0.4"))
    assert [thread.box["devices"] for thread in (first, second)] == [[0], [1]]
    revoke_box(server.folder, first.box["name"])
    third = joined(server, tmp_path / "third", wish("device", 0, host="10.0.0.5"))
    assert third.box["devices"] == [0]


def test_a_control_unit_gets_the_first_cluster_that_is_free(server, tmp_path):
    joined(server, tmp_path / "named", wish(cluster=1))
    assert [joined(server, tmp_path / f"cu{n}", wish()).box["name"] for n in range(2)] == ["cu-0", "cu-2"]


def test_a_device_waits_for_the_control_unit_of_its_cluster(server, tmp_path):
    device = JoiningThread(tmp_path / "device", server.code(), wish("device", 0))
    (box,) = waiting(server)
    with pytest.raises(ValueError, match="cluster 0 has no control unit that joined by a code yet"):
        approve_box(server.folder, box.box_id)
    reasons, reported = [], set()
    for _ in range(3):
        approve_waiting(server.folder, reasons.append, reported)
    assert device.box is None and len(reasons) == 1 and "has no control unit that joined by a code yet" in reasons[0]
    unit = JoiningThread(tmp_path / "cu", server.code(), wish())
    waiting(server, 2)
    said = []
    approve_waiting(server.folder, said.append)
    assert (unit.done().box["name"], device.done().box["name"]) == ("cu-0", "device-0-0") and len(said) == 2


def test_control_units_get_clusters_of_their_own(server, tmp_path):
    names = [joined(server, tmp_path / f"cu{n}", wish()).box["name"] for n in range(2)]
    assert names == ["cu-0", "cu-1"]
    JoiningThread(tmp_path / "third", server.code(), wish(cluster=1))
    (box,) = waiting(server)
    with pytest.raises(ValueError, match="cu-1 is another machine; collapipe revoke --cluster 1"):
        approve_box(server.folder, box.box_id)
    JoiningThread(tmp_path / "device", server.code(), wish("device", 0, devices=[3]))
    approve_box(server.folder, waiting(server, 2)[1].box_id)
    JoiningThread(tmp_path / "device again", server.code(), wish("device", 0, devices=[3]))
    with pytest.raises(ValueError, match="cluster 0 has a device 3 already"):
        approve_box(server.folder, waiting(server, 2)[1].box_id)


def refusal(folder, code, wanted=None):
    with pytest.raises(JoinRefused) as refused:
        join_deployment(BoxFolder(folder), code, wanted or wish(), 20.0)
    assert not (folder / "box.json").exists() and not (folder / "ray-token").exists()
    return str(refused.value)


def test_a_stolen_code_opens_nothing_once_its_box_has_shown_it(server, tmp_path):
    code = server.code()
    thread = JoiningThread(tmp_path / "box", code, wish())
    (box,) = waiting(server)
    assert "another box has shown this code before" in refusal(tmp_path / "thief", code)
    approve_box(server.folder, box.box_id)
    assert thread.done().error is None
    assert "another box has shown this code before" in refusal(tmp_path / "thief", code)
    assert [other.box_id for other in server.folder.boxes()] == [box.box_id]
    assert any("shown by another" in words for words in server.words)


def test_a_thief_who_was_first_waits_for_an_approval_and_the_owner_is_told(server, tmp_path):
    code = server.code()
    JoiningThread(tmp_path / "thief", code, wish())
    (stranger,) = waiting(server)
    assert "tell who runs the edge server" in refusal(tmp_path / "box", code)
    revoke_box(server.folder, stranger.box_id)
    assert "it was refused there" in refusal(tmp_path / "thief", code)
    assert not list(server.folder.server.supernodes.glob("*.pub"))


def test_of_boxes_that_show_a_code_at_once_one_has_it(server, tmp_path):
    code, barrier, taken = server.code(), threading.Barrier(6), []
    requests = [JoiningThread(tmp_path / str(n), server.code(), wish()) for n in range(6)]
    boxes = waiting(server, 6)

    def take(box):
        barrier.wait()
        taken.append(server.folder.take(code.token_hash, box.request))

    threads = [threading.Thread(target=take, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 5 + [True] and all(thread.error is None for thread in requests)
    assert not list((server.folder.folder / "requests").glob(".*"))


def test_an_expired_code_and_one_that_nobody_gave_out_open_nothing(server, tmp_path):
    assert "the code has expired" in refusal(tmp_path / "late", server.code(minutes=-1))
    unknown = JoinCode(address=server.address, token=bytes(16), fingerprint=server.code().fingerprint)
    assert "none of ours" in refusal(tmp_path / "guess", unknown)


def test_a_box_that_has_shown_its_code_in_time_may_wait_longer(server, tmp_path):
    code = server.code(minutes=60)
    thread = JoiningThread(tmp_path / "box", code, wish())
    (box,) = waiting(server)
    server.folder.invite(code, -1)
    time.sleep(0.2)
    approve_box(server.folder, box.box_id)
    assert thread.done().error is None
    # Codes that nobody has shown in time are forgotten, this one is not.
    server.folder.invite(server.code(minutes=-1), -1)
    invited = server.code()
    assert server.folder.num_unused_codes() == 1 and server.folder.knows(invited.token_hash)
    assert server.folder.knows(code.token_hash)


class Recorder:
    """A desk that notes what it is told, with another authority's certificate or its own."""

    def __init__(self, authority):
        self.authority, self.lines = authority, []

    def answer(self, line):
        self.lines.append(json.loads(line))
        return {"authority": self.authority, "status": "waiting"}


@pytest.mark.parametrize("shows", ["its own authority", "the right authority"])
def test_who_cannot_prove_the_fingerprint_is_told_no_token(server, tmp_path, shows):
    stranger = EdgeJoining(name=HOST, root=tmp_path / "stranger")
    stranger.prepare()
    own = shows == "its own authority"
    authority = (stranger.folder if own else server.folder).authority.certificate.read_text()
    recorder = Recorder(authority)
    service = JoinService(recorder, stranger.folder, HostPort(HOST, 0))
    threading.Thread(target=service.serve, daemon=True).start()
    code = server.code()
    led_astray = JoinCode(address=HostPort(HOST, service.port), token=code.token, fingerprint=code.fingerprint)
    reason = refusal(tmp_path / "box", led_astray)
    service.close()
    assert "told nothing" in reason and (
        "fingerprint" in reason if own else "no certificate of the authority" in reason
    )
    assert recorder.lines == [{"ask": "authority"}]
    # The code is as good as before.
    JoiningThread(tmp_path / "box", code, wish())
    assert waiting(server)


def test_a_revoked_box_is_refused_everywhere(server, tmp_path):
    code = server.code()
    unit = JoiningThread(tmp_path / "cu" / "joined", code, wish())
    approve_box(server.folder, waiting(server)[0].box_id)
    unit.done()
    device = joined(server, tmp_path / "device", wish("device", 0))
    before = trusted_state(server.folder)
    revoke_box(server.folder, "device-0-0")
    serials = {x509.load_pem_x509_certificate(t.folder.files.certificate.read_bytes()).serial_number for t in [device]}
    crl = x509.load_pem_x509_crl(server.folder.server.revoked_certificates.read_bytes())
    assert {entry.serial_number for entry in crl} == serials and trusted_state(server.folder) == before
    revoke_box(server.folder, "cu-0")
    assert trusted_keys(server.folder.server) == {} and trusted_state(server.folder) != before
    serials.add(x509.load_pem_x509_certificate(unit.folder.files.certificate.read_bytes()).serial_number)
    crl = x509.load_pem_x509_crl(server.folder.server.revoked_certificates.read_bytes())
    assert {entry.serial_number for entry in crl} == serials
    with pytest.raises(JoinRefused, match="it was revoked there"):
        join_deployment(unit.folder, code, wish(), 20.0)
    with pytest.raises(JoinRefused, match="cu-0 starts nothing: this box was revoked"):
        JoiningBox(code="", state=tmp_path / "cu").up(print)
    with pytest.raises(ValueError, match="is revoked already"):
        revoke_box(server.folder, "cu-0")
    # Its place is free for another, whose secret is another, too.
    old_secret = unit.folder.files.ray_token.read_bytes()
    again = joined(server, tmp_path / "again", wish())
    assert again.box["name"] == "cu-0" and again.folder.files.ray_token.read_bytes() != old_secret


def test_when_a_device_is_revoked_the_others_of_its_cluster_have_what_it_has_not(server, tmp_path):
    unit = joined(server, tmp_path / "cu", wish())
    first, second = (joined(server, tmp_path / f"d{i}", wish("device", 0, host=f"10.0.0.{i}")) for i in (3, 4))
    stranger = joined(server, tmp_path / "other", wish(host="10.0.0.9"))
    boxes = (unit, first, second, stranger)

    def trust(box):
        files = box.folder.files
        return files.ray_token.read_text(), files.cluster_ca.read_text(), files.node_certificate.read_text()

    before = [trust(box) for box in boxes]
    assert len({token for token, _, _ in before[:3]}) == len({ca for _, ca, _ in before[:3]}) == 1
    assert not {before[0][:2]} & {before[3][:2]}
    words = []
    revoke_box(server.folder, "device-0-0", words.append)
    assert "cu-0, device-0-1 of its cluster start again" in words[0]
    watches = [MembershipWatch(box.folder, words.append, poll_s=0.05) for box in boxes]
    eventually(lambda: sum(bool(watch.reason()) for watch in watches) >= 3)
    for watch in watches:
        watch.stop()
    assert [watch.is_renewed for watch in watches] == [True, False, True, False]
    assert "was revoked on the edge server" in watches[1].reason() and not watches[3].reason()
    after = [trust(box) for box in boxes]
    assert after[1] == before[1] and after[3] == before[3]
    assert after[0][:2] == after[2][:2] != before[0][:2] and after[0][0] != before[0][0]
    # Its certificate is of nobody whom the others believe.
    renewed = x509.load_pem_x509_certificate(after[0][1].encode())
    for box, trusted in ((unit, True), (second, True), (first, False)):
        node = x509.load_pem_x509_certificate(box.folder.files.node_certificate.read_bytes())
        with contextlib.nullcontext() if trusted else pytest.raises(InvalidSignature):
            node.verify_directly_issued_by(renewed)


def test_a_box_is_told_its_state_by_the_secret_that_it_alone_has(server, tmp_path):
    unit = joined(server, tmp_path / "cu", wish())
    question = unit.folder.renewal_question()
    assert server.ask(question)["name"] == "cu-0"
    for wrong in ({"claim": question["code"]}, {"code": "0" * 64}, {"code": "../codes"}, {"code": 3}, {"claim": None}):
        answer = server.ask(question | wrong)
        assert answer["status"] == "error" and "ray_token" not in answer


def test_a_server_that_is_down_ends_nobodys_programs(server, tmp_path):
    unit = joined(server, tmp_path / "cu", wish())
    server.service.close()
    watch = MembershipWatch(unit.folder, lambda _: None, poll_s=60.0)
    watch.stop()
    assert watch.look() == "" and not watch.is_renewed


def test_what_is_secret_is_for_its_owner_alone(server, tmp_path):
    joined(server, tmp_path / "cu", wish())
    secret = [path for path in (tmp_path / "cu").iterdir() if path.suffix in (".key", ".json", "")]
    secret += list((server.root / "joining").glob("*/*.json"))
    assert len(secret) >= 8 and {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_no_token_is_kept_or_told(server, tmp_path):
    code = server.code()
    unit = JoiningThread(tmp_path / "cu", code, wish())
    approve_box(server.folder, waiting(server)[0].box_id)
    unit.done()
    _, token, _ = str(code).split("/")
    kept = [path for folder in (server.root, tmp_path / "cu") for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if token.encode() in path.read_bytes() or code.token in path.read_bytes()]
    assert token not in repr(code) and token not in "".join(server.words + unit.words)


def test_a_box_has_the_programs_of_its_place_now_and_the_next_time(server, tmp_path):
    text, state = tmp_path / "text", tmp_path / "state"
    text.mkdir()
    box = joined_by_files(server.root, state, "10.0.0.2", data=str(text), devices=[0], ray_port=7000)
    place = box.folder.box()
    unit = machine_of(place, box.folder, box.state)
    assert (unit.cluster, unit.host, unit.server, unit.data) == (0, "10.0.0.2", f"{HOST}:9092", str(text))
    assert (unit.devices, unit.ray_port, unit.certs.folder) == ([0], 7000, state / "joined")
    unit.certs.check()
    # With the code or without: nobody is asked again, not even a server that is gone.
    server.service.close()
    assert box.join(print) == place == JoiningBox(code="", state=state).join(print)


def test_an_attempt_that_fails_leaves_what_the_box_had(server, tmp_path):
    folder = joined_by_files(server.root, tmp_path / "state").folder.folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(JoinRefused):
        JoiningBox(code=str(server.code(minutes=-1)), state=tmp_path / "state", control_unit=True).join(print)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_box_that_cannot_write_its_new_secret_says_so_and_tries_again(server, tmp_path, monkeypatch):
    """Its watch ended at one full disk, and it never heard of the new secret."""
    unit = joined(server, tmp_path / "cu", wish())
    joined(server, tmp_path / "device", wish("device", 0, host="10.0.0.3"))
    words = []
    watch = MembershipWatch(unit.folder, words.append, poll_s=0.05)
    with monkeypatch.context() as patch:

        def full(_, path, write):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        revoke_box(server.folder, "device-0-0")
        patch.setattr(Disk, "fill", full)
        eventually(lambda: len(words) > 1)
    eventually(lambda: watch.is_renewed)
    watch.stop()
    assert "No space left on device" in words[0] and "cluster.pem" in words[0]
    assert unit.folder.files.ray_token.read_text() == server.folder.find("cu-0").answer["ray_token"]
