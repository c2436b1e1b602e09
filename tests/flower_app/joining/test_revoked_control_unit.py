"""A revoked control unit has nothing left of its cluster; a box that is refused or killed has one identity, or none."""

import contextlib
import shutil
import threading
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.joining.approval import approve_box, revoke_box, shared_address_warning
from flower_app.joining.joined_box import JoiningBox, MembershipWatch
from flower_app.joining.newcomer import JoinRefused
from flower_app.joining.registrar import approve_waiting
from helpers.joining import JoiningThread, edge_folder, joined, joined_by_files, waiting, wish


def cluster(server, tmp_path):
    unit = joined(server, tmp_path / "cu", wish(host="10.0.0.2"))
    devices = [joined(server, tmp_path / f"d{i}", wish("device", 0, host=f"10.0.0.{i}")) for i in (3, 4)]
    return unit, *devices


def asked(box):
    """Have a box ask once; returns why it has to end, and whether it was given something new."""
    watch = MembershipWatch(box.folder, lambda _: None, poll_s=60.0)
    watch.stop()
    return watch.reason(), watch.is_renewed


def secret(box):
    return box.folder.files.ray_token.read_text()


def by_box(server, unit):
    revoke_box(server.folder, "cu-0")


def by_cluster(server, unit):
    done = CliRunner().invoke(app, ["revoke", "--cluster", "0", "--out", str(server.root)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("revoke", [by_box, by_cluster])
def test_the_devices_of_a_revoked_control_unit_believe_it_no_more(server, tmp_path, revoke):
    """They kept its secret and its authority: it could go on as the head of their Ray."""
    unit, *devices = cluster(server, tmp_path)
    other = joined(server, tmp_path / "other", wish(host="10.0.0.9"))
    before = {box: secret(box) for box in (unit, *devices, other)}
    revoke(server, unit)
    answers = [asked(box) for box in (unit, *devices, other)]
    assert [is_renewed for _, is_renewed in answers] == [False, True, True, False]
    assert "was revoked on the edge server" in answers[0][0] and answers[3][0] == ""
    # It has not what they have, and its certificate is of nobody whom they believe.
    assert secret(unit) == before[unit] == before[devices[0]] and secret(other) == before[other]
    assert secret(devices[0]) == secret(devices[1]) != before[unit]
    authority = x509.load_pem_x509_certificate(devices[0].folder.files.cluster_ca.read_bytes())
    for box, is_believed in ((unit, False), *((device, True) for device in devices)):
        node = x509.load_pem_x509_certificate(box.folder.files.node_certificate.read_bytes())
        with contextlib.nullcontext() if is_believed else pytest.raises(InvalidSignature):
            node.verify_directly_issued_by(authority)


def test_the_next_control_unit_of_a_cluster_has_the_boxes_of_the_revoked_one(server, tmp_path):
    unit, *devices = cluster(server, tmp_path)
    revoke_box(server.folder, "cu-0")
    for device in devices:
        asked(device)
    again = joined(server, tmp_path / "again", wish(host="10.0.0.7", ray_port=7000))
    assert again.box["name"] == "cu-0"
    assert [asked(device)[1] for device in devices] == [True, True]
    assert {device.folder.box()["cu"] for device in devices} == {"10.0.0.7:7000"}
    assert {secret(box) for box in (again, *devices)} == {secret(again)} != {secret(unit)}
    assert len({box.folder.files.cluster_ca.read_text() for box in (again, *devices)}) == 1
    # And is told so once.
    assert [asked(device) for device in devices] == [("", False)] * 2


def test_a_device_that_was_off_meanwhile_is_told_the_same(server, tmp_path):
    unit, *devices = cluster(server, tmp_path)
    revoke_box(server.folder, "cu-0")
    again = joined(server, tmp_path / "again", wish(host="10.0.0.7"))
    assert asked(devices[0])[1] and devices[0].folder.box()["cu"] == "10.0.0.7:6379"
    assert secret(devices[0]) == secret(again) != secret(unit)


# The address of another machine


@pytest.mark.parametrize(("host", "is_told"), [("10.0.0.2", True), ("10.0.0.3", False), ("127.0.0.1", False)])
def test_who_lets_a_device_in_is_told_that_it_has_its_control_units_address(server, tmp_path, host, is_told):
    """Its certificate is for that address: to the other devices it could stand for the control unit."""
    joined(server, tmp_path / "cu", wish(host=host if host == "127.0.0.1" else "10.0.0.2"))
    JoiningThread(tmp_path / "by hand", server.code(), wish("device", 0, host=host))
    (box,) = waiting(server)
    done = CliRunner().invoke(app, ["approve", box.box_id, "--out", str(server.root)])
    expected = f"warning: device-0-0 has the address of cu-0, {host}, and can stand for it; unless they are one machine"
    assert done.exit_code == 0 and (expected in done.stderr) == is_told
    JoiningThread(tmp_path / "by itself", server.code(), wish("device", 0, host=host))
    waiting(server)
    words = []
    approve_waiting(server.folder, words.append)
    assert any("device-0-1 has the address of cu-0" in line for line in words) == is_told


@pytest.mark.parametrize(
    ("unit", "device", "is_told"),
    [
        ("10.0.0.2", "::ffff:10.0.0.2", True),
        ("10.0.0.2", "[::FFFF:a00:2]", True),
        ("10.0.0.2", "10.2", True),
        ("10.0.0.2", "10.3", False),
        ("unit.example", "Unit.Example", True),
        ("127.0.0.1", "127.1", False),
    ],
)
def test_an_address_is_known_in_each_of_its_forms(tmp_path, unit, device, is_told):
    folder = edge_folder(tmp_path / "certs")
    joined_by_files(folder.root, tmp_path / "cu", unit)
    joined_by_files(folder.root, tmp_path / "device", "10.0.0.9", cluster=0)
    box = folder.find("device-0-0")
    warning = shared_address_warning(folder, replace(box, request=replace(box.request, host=device)))
    assert ("has the address of cu-0" in warning) == is_told


# What stays on a box


@pytest.mark.parametrize("kind", ["control-unit", "device"])
def test_a_box_that_is_refused_keeps_no_key(server, tmp_path, kind):
    state, code = tmp_path / "state", server.code()
    options = {"control_unit": True} if kind == "control-unit" else {"cluster": 0}
    box = JoiningBox(code=str(code), state=state, **options)
    refused = []

    def join():
        with pytest.raises(JoinRefused) as error:
            box.join(print)
        refused.append(str(error.value))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    revoke_box(server.folder, waiting(server)[0].box_id)
    thread.join(120)
    assert "it was refused there" in refused[0]
    assert not [path for path in state.rglob("*") if path.suffix in (".key", ".pub")]
    # The same command says the same.
    join()
    assert "it was refused there" in refused[1]


@pytest.mark.parametrize("killed", ["before the old goes", "between the two"])
def test_a_join_that_was_killed_leaves_the_box_what_it_has_become(server, tmp_path, killed):
    """Killed between two renames it left neither the old identity nor the new one."""
    state = tmp_path / "state"
    joined(server, state / "joined", wish(host="10.0.0.2"))
    code = server.code()
    second = joined_by(server, state / f"joining-{code.token_hash[:16]}", code)
    if killed == "between the two":
        (state / "joined").rename(state / ".joined.aside-1")
    box = JoiningBox(code="", state=state)
    assert box.join(print)["name"] == second["name"] == "cu-1"
    box.folder.files.check()
    assert [path.name for path in state.iterdir()] == ["joined"]
    # The code is that by which it has joined.
    server.service.close()
    assert JoiningBox(code=str(code), state=state, control_unit=True).join(print)["name"] == "cu-1"


def joined_by(server, folder, code):
    thread = JoiningThread(folder, code, wish(host="10.0.0.5"))
    approve_box(server.folder, waiting(server)[0].box_id)
    assert thread.done().error is None, thread.error
    return thread.box


def test_half_a_join_is_not_taken_for_a_whole_one(server, tmp_path):
    state = tmp_path / "state"
    joined(server, state / "joined", wish(host="10.0.0.2"))
    shutil.copytree(state / "joined", state / "joining-0123")
    (state / "joining-0123" / "box.json").unlink()
    assert JoiningBox(code="", state=state).join(print)["name"] == "cu-0"
    assert (state / "joining-0123").is_dir()
