"""A box joins without a network: an invitation, a request and an answer are carried as files."""

import json
import stat

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.deployment.credentials import CuFiles
from flower_app.joining.join_folder import JoinFolder
from flower_app.joining.joined_box import JoiningBox, machine_of
from flower_app.joining.newcomer import JoinRefused
from helpers.joining import edge_folder, joined_by_files


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def invited(tmp_path, *options):
    """An invitation that was carried to a box, by the commands of the edge server."""
    done = run(
        "invite", "--name", "10.0.0.1", "--file", tmp_path / "box-1.invite", "--out", tmp_path / "certs", *options
    )
    assert done.exit_code == 0 and "collapipe join box-1.invite" in done.stderr, done.output
    return tmp_path / "box-1.invite"


def box_of(tmp_path, invitation, state="state", **options):
    return JoiningBox(code=str(invitation), state=tmp_path / state, control_unit=True, **{"host": "10.0.0.2"} | options)


def approved(tmp_path, request="box-1.request"):
    return run("approve", "--file", tmp_path / request, "--out", tmp_path / "certs", "--json")


def test_a_box_joins_by_three_files_and_its_keys_stay_on_it(tmp_path):
    invitation, words = invited(tmp_path), []
    box = box_of(tmp_path, invitation)
    assert box.join(words.append) == {} and "collapipe approve --file box-1.request" in words[-1]
    # The same command again asks the same.
    assert box.join(words.append) == {}
    done = approved(tmp_path)
    assert [entry["name"] for entry in json.loads(done.stdout)["approved"]] == ["cu-0"], done.output
    answer = tmp_path / "box-1.answer"
    carried = [invitation, invitation.with_suffix(".request"), answer]
    assert {stat.S_IMODE(path.stat().st_mode) for path in carried} == {0o600}
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in carried)
    joined = box.join(words.append)
    assert (joined["name"], joined["superlink"], joined["host"]) == ("cu-0", "10.0.0.1:9092", "10.0.0.2")
    CuFiles(box.folder.folder).check()
    assert not answer.exists() and not carried[1].exists()
    # From now on the invitation starts the box, and nobody is asked.
    assert box.join(words.append) == joined == JoiningBox(code="", state=tmp_path / "state").join(print)


def test_devices_of_the_cluster_join_alike(tmp_path):
    root = tmp_path / "certs"
    edge_folder(root, "10.0.0.1")
    unit = joined_by_files(root, tmp_path / "cu", "10.0.0.2", ray_port=7000)
    device = joined_by_files(root, tmp_path / "device", "10.0.0.3", cluster=0)
    joined = device.folder.box()
    assert (joined["name"], joined["cu"], joined["devices"]) == ("device-0-0", "10.0.0.2:7000", [0])
    assert device.folder.files.ray_token.read_text() == unit.folder.files.ray_token.read_text()
    machine_of(joined, device.folder, device.state).certs.check()


def test_an_answer_that_was_changed_or_is_anothers_is_refused(tmp_path):
    invitation = invited(tmp_path)
    box = box_of(tmp_path, invitation)
    box.join(print)
    assert approved(tmp_path).exit_code == 0
    answer = tmp_path / "box-1.answer"
    good = answer.read_bytes()
    for wrong in (good.replace(b"9092", b"9093"), good.splitlines()[0] + b"\n", b"", b"x\ny\n"):
        answer.write_bytes(wrong)
        with pytest.raises(JoinRefused, match="expected an answer signed by the authority in the code"):
            box.join(print)
    # Another edge server's, and another box's of the same edge server.
    other = tmp_path / "other"
    other.mkdir()
    box_of(other, invited(other)).join(print)
    assert approved(other).exit_code == 0
    answer.write_bytes((other / "box-1.answer").read_bytes())
    with pytest.raises(JoinRefused, match="signed by the authority in the code"):
        box.join(print)
    answer.write_bytes(good)
    with pytest.raises(JoinRefused, match="signed another key"):
        box_of(tmp_path, invitation, "stranger").join(print)
    assert box.join(print)["name"] == "cu-0"


def test_a_request_file_is_good_for_its_box_and_its_code_alone(tmp_path):
    invitation = invited(tmp_path)
    box_of(tmp_path, invitation).join(print)
    assert approved(tmp_path).exit_code == 0
    # Lost on its way, the answer is written again.
    (tmp_path / "box-1.answer").unlink()
    assert approved(tmp_path).exit_code == 0
    thief = tmp_path / "thief"
    thief.mkdir()
    (thief / "box-1.invite").write_bytes(invitation.read_bytes())
    box_of(tmp_path, thief / "box-1.invite", "thief").join(print)
    done = approved(tmp_path, "thief/box-1.request")
    assert done.exit_code == 2 and "another box has shown this code before" in done.stderr
    (tmp_path / "none.request").write_bytes(b"x" * 100_000)
    done = approved(tmp_path, "none.request")
    assert done.exit_code == 2 and "expected a JSON object" in done.stderr
    run("revoke", "--box", "cu-0", "--out", tmp_path / "certs")
    done = approved(tmp_path)
    assert done.exit_code == 2 and "found one that is revoked" in done.stderr


def test_an_invitation_has_an_end(tmp_path):
    invitation = invited(tmp_path, "--minutes", "1e-7")
    box_of(tmp_path, invitation).join(print)
    done = approved(tmp_path)
    assert done.exit_code == 2 and "the code has expired" in done.stderr


def test_a_box_without_a_network_names_its_address(tmp_path):
    done = run("join", invited(tmp_path), "--control-unit", "--state", tmp_path / "state")
    assert done.exit_code == 2 and "--host: expected the address of this machine" in done.stderr


def test_a_box_that_has_joined_takes_other_options_at_its_next_start(tmp_path):
    root, state = tmp_path / "certs", tmp_path / "state"
    edge_folder(root)
    box = joined_by_files(root, state, object_store_mb=80)
    changed = JoiningBox(code="", state=state, data=str(tmp_path), metrics="9096").join(print)
    assert changed == box.folder.box()
    assert (
        changed["options"] | {"data": "", "metrics": ""} == box._options() and changed["options"]["metrics"] == "9096"
    )
    with pytest.raises(ValueError, match="--ray-port: cu-0 has joined with 6379"):
        JoiningBox(code="", state=state, ray_port=7000).join(print)


@pytest.mark.parametrize("name", ["box.request", "box.answer"])
def test_an_invitation_with_the_name_of_another_file_is_refused_before_it_is_lost(tmp_path, name):
    """The request was written over it, and the box could ask no more."""
    invitation = invited(tmp_path).rename(tmp_path / name)
    code = invitation.read_bytes()
    with pytest.raises(ValueError, match=rf"CODE: .*{name}: is the file that is read, .*; name another"):
        box_of(tmp_path, invitation).join(print)
    assert invitation.read_bytes() == code and not list((tmp_path / "state").rglob("*.key"))


def test_an_answer_is_not_written_over_its_request(tmp_path):
    invitation = invited(tmp_path)
    box_of(tmp_path, invitation).join(print)
    request = (tmp_path / "box-1.request").rename(tmp_path / "box-1.answer")
    line = request.read_bytes()
    done = approved(tmp_path, request.name)
    assert done.exit_code == 2 and "--file: " in done.stderr and "is the file that is read" in done.stderr
    assert request.read_bytes() == line and not JoinFolder(tmp_path / "certs").boxes()
