"""``collapipe invite``, ``boxes``, ``approve`` and ``revoke`` on the edge server."""

import json

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.joining.edge_joining import invite
from flower_app.joining.join_code import JoinCode
from helpers.joining import JoiningThread, waiting, wish


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_of_the_edge_server(server, tmp_path):
    out = ("--out", server.root)
    (code,) = json.loads(run("invite", "--json", *out).stdout)["codes"]
    made = JoinCode.read(code)
    assert made.address.port == 9095 and str(made) == code
    thread = JoiningThread(
        tmp_path / "box", JoinCode(address=server.address, token=made.token, fingerprint=made.fingerprint), wish()
    )
    (box,) = waiting(server)
    shown = json.loads(run("boxes", "--json", *out).stdout)
    assert [(b["box"], b["status"], b["host"]) for b in shown["boxes"]] == [(box.box_id, "waiting", "10.0.0.2")]
    assert shown["unused_codes"] == 0 and box.box_id in run("boxes", *out).output
    assert json.loads(run("approve", box.box_id, "--json", *out).stdout) == {
        "approved": [{"box": box.box_id, "name": "cu-0"}],
        "refused": [],
    }
    assert thread.done().error is None
    assert json.loads(run("revoke", "--box", box.box_id, "--json", *out).stdout)["revoked"] == "cu-0"
    assert json.loads(run("boxes", "--json", *out).stdout)["boxes"][0]["status"] == "revoked"
    assert run("approve", box.box_id, *out).exit_code == 2 and run("approve", *out).exit_code == 2
    assert run("approve", "--all", *out).exit_code == 0 and run("revoke", *out).exit_code == 2


def test_a_box_that_cannot_be_approved_hides_none_that_is(server, tmp_path):
    out = ("--out", server.root)
    for cluster in (0, 3):
        JoiningThread(tmp_path / f"device-{cluster}", server.code(), wish("device", cluster))
    JoiningThread(tmp_path / "cu", server.code(), wish())
    waiting(server, 3)
    done = run("approve", "--all", "--json", *out)
    answer = json.loads(done.stdout)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert [box["name"] for box in answer["approved"]] == ["cu-0", "device-0-0"]
    ((box,), (refused,)) = waiting(server), answer["refused"]
    assert refused["box"] == box.box_id and "cluster 3 has no control unit" in refused["reason"]
    assert f"{box.box_id} is not let in: {refused['reason']}" in done.stderr
    assert run("approve", "--all", *out).exit_code == 1 and run("approve", box.box_id, *out).exit_code == 2


def test_codes_are_made_where_boxes_can_join_alone(tmp_path):
    for command in (["invite"], ["boxes"], ["approve", "--all"]):
        done = run(*command, "--out", tmp_path)
        assert done.exit_code == 2 and "collapipe up edge-server --name HOST" in done.output


def test_numbers_of_an_invitation_that_are_none(server):
    for options in ({"codes": 0}, {"codes": 1001}, {"minutes": 0}, {"minutes": 20_000}):
        with pytest.raises(ValueError, match="--codes|--minutes"):
            invite(server.folder, **options)
