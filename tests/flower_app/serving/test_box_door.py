"""Doors of boxes: who opens them, what they are told, and what is refused before anything starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from flwr.app import ConfigRecord, RecordDict
from typer.testing import CliRunner

from client_pipeline.partition.spec import ModelSpec
from flower_app.cli.main import app
from flower_app.cli.options import ExitCode
from flower_app.config.serve_config import ServeConfig
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.metrics_door import metrics_address, metrics_ports
from flower_app.joining.joined_box import JoiningBox
from flower_app.launch.single_run import new_run
from flower_app.serving.box_door import BoxDoor
from flower_app.serving.door import ANY_ADDRESS, door_app
from flower_app.serving.door_key import door_key, key_digest
from flower_app.training.given_model import check_answering
from helpers.decoder_only import small_spec
from strategies.grid.received_report import checked_door
from strategies.grid.received_values import MalformedReply
from strategies.records import CONFIG


def box(folder, **options):
    place = {"cluster": 0, "host": "127.0.0.1", "server": "127.0.0.1", "certs": None, "state": folder}
    return ControlUnitBox(**place, **options)


@pytest.mark.parametrize("tls", [None, (Path("node.pem"), Path("cu.key"))])
def test_a_door_reads_what_its_box_has_written(tls):
    door = BoxDoor(
        folder=Path("/door"), cluster=1, ray_address="h:1", host="10.0.0.2", address="10.0.0.2:8443", tls=tls
    )
    assert BoxDoor.of_command(door.command()[4:]) == door


@pytest.mark.parametrize("serve", ["host.example:8443", "8443x", "10.0.0.2", "[::1]8443"])
def test_a_door_has_an_address_of_its_machine(tmp_path, serve):
    with pytest.raises(ValueError, match="--serve: expected"):
        box(tmp_path, serve=serve)


def test_a_door_that_others_reach_wants_a_certificate():
    with pytest.raises(ValueError, match=r"--serve: 10\.0\.0\.2 is reached by others, and this machine has no cert"):
        metrics_ports(metrics_address("10.0.0.2:8443", "--serve"), False, "--serve", "of the door")


def test_a_device_opens_no_door(tmp_path):
    with pytest.raises(ValueError, match="--serve: expected on a control unit, found on a device"):
        JoiningBox(code="x", state=tmp_path, cluster=0, serve="8443")


def test_the_key_is_told_once_and_its_digest_kept_for_its_user_alone(tmp_path):
    key, digest = door_key(tmp_path, new=False)
    assert len(key) >= 22 and digest == key_digest(key)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and key not in file.read_text()
    assert door_key(tmp_path, new=False) == ("", digest)
    file.write_text("no digest")
    with pytest.raises(ValueError, match="expected the digest of a key"):
        door_key(tmp_path, new=False)


def test_boxes_answer_with_the_whole_model_at_their_site():
    assert ServeConfig(when="now").head == "cluster"
    with pytest.raises(ValueError, match=r'serve\.head: .* found "server"; set serve\.head = "cluster"'):
        ServeConfig(head="server", when="now")
    # As runs of before have it.
    ServeConfig(head="server")
    with pytest.raises(ValueError, match="serve.head: expected one of server, cluster, found 'here'"):
        ServeConfig(head="here")


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.0.2.7:8443", 401), ("[2001:db8::1]:8443", 401), ("192.0.2.7", 401), ("evil.example", 403), ("*.", 403)],
)
def test_a_door_of_all_addresses_is_known_by_any_address_and_by_no_other_name(host, status):
    served = SimpleNamespace(bounds=SimpleNamespace(request_s=5.0))
    client = TestClient(door_app(served, key_digest("key"), [ANY_ADDRESS], ""))
    assert client.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("command", "words"),
    [(["serve", "--end"], "--end: expected with --superlink"), (["run", "--after-training"], "expected with --super")],
)
def test_orders_to_boxes_need_a_deployment(command, words):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == ExitCode.BAD_INPUT and words in done.stderr


def test_a_simulation_has_no_boxes_and_a_translation_no_answers():
    with pytest.raises(ValueError, match=r"serve\.when: expected never in a simulation.* collapipe serve RUN"):
        new_run(None, {"serve.when": "after-training"})
    check_answering(small_spec("llama"))
    with pytest.raises(ValueError, match=r"serve\.when: .* found 'transformer' with the head seq2seq"):
        check_answering(ModelSpec(family="transformer", head="seq2seq", config={}))


@pytest.mark.parametrize("text", ["[]", "{}", '{"cluster": 0}', '{"cluster": -1, "door": "x"}', '{"error": 3}', "{"])
def test_an_answer_that_cannot_be_read_is_named(text):
    with pytest.raises(MalformedReply):
        checked_door(RecordDict({CONFIG: ConfigRecord({"json": text})}))


def test_answers_about_doors_are_read():
    for text in ('{"cluster": 0, "door": "https://10.0.0.2:1/v1"}', '{"cluster": 1, "closed": true}', '{"error": "e"}'):
        assert checked_door(RecordDict({CONFIG: ConfigRecord({"json": text})}))
