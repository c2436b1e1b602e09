"""Answers of edge server and control units to Prometheus: access, and values that match the run."""

import json
import os
import socket
import ssl
import stat
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from client_pipeline.link.hosts import HostPort
from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.credentials import CuFiles, ServerFiles
from flower_app.deployment.edge_server import EdgeServer
from flower_app.deployment.metrics_door import metrics_address, metrics_ports, metrics_token
from flower_app.node.round_notes import NOTES, noted_round, read_notes
from flower_app.runs.run_directory import LATEST, write_config
from flower_app.watch import metrics_server
from flower_app.watch.control_unit_metrics import control_unit_metrics
from flower_app.watch.metrics_server import MOST_SCRAPES, served_metrics
from flower_app.watch.run_metrics import NewestRun
from helpers.control_unit_folder import REPORT, control_unit_text
from helpers.joining import edge_folder
from helpers.planned_run import planned_run


def one_sample():
    return "collapipe_round 2.0\n"


def values(text):
    """Value of each sample, by metric and labels beside run and cluster."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k not in ("run", "cluster"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def asked(address, token, context=None):
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120, context=context) as answer:
        return answer.read().decode()


@pytest.fixture
def served(tmp_path):
    """Address and token of a server on the loopback."""
    lines = []
    with served_metrics(HostPort("127.0.0.1", 0), one_sample, metrics_token(tmp_path), None, lines.append):
        yield lines[0].split()[1].rstrip(","), (tmp_path / "metrics-token").read_text().strip()


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic {token}", "{token}"])
def test_without_the_token_there_is_no_answer(served, authorization):
    address, token = served
    headers = {} if authorization is None else {"authorization": authorization.format(token=token)}
    for query in ("", f"?token={token}"):
        with pytest.raises(urllib.error.HTTPError, match="40[34]"):
            urllib.request.urlopen(urllib.request.Request(address + query, headers=headers), timeout=120)


def test_only_the_metrics_have_an_address(served):
    address, token = served
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(address.removesuffix("metrics"), token)
    request = urllib.request.Request(address, headers={"Authorization": f"bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_idle_connections_are_bounded_in_number_and_time(served, monkeypatch):
    address, token = served
    port = int(address.split(":")[2].removesuffix("/metrics"))
    monkeypatch.setattr(metrics_server, "IDLE_S", 0.5)
    idle = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(MOST_SCRAPES)]
    with socket.create_connection(("127.0.0.1", port), timeout=120) as one_too_many:
        assert one_too_many.recv(1) == b""
    for connection in idle:
        assert connection.recv(1) == b""
        connection.close()
    assert asked(address, token) == one_sample()


def test_the_edge_server_shows_the_newest_run_whichever_that_is(tmp_path):
    runs = tmp_path / "runs"
    newest = NewestRun(runs)
    assert values(newest.text()) == {}
    for name, rounds in (("first", 2), ("second", 3)):
        write_config(planned_run(runs / name, load_scenario("unequal"), rounds), RunConfig(scenario="unequal"))
        (runs / LATEST).unlink(missing_ok=True)
        (runs / LATEST).symlink_to(name)
        text = newest.text()
        assert values(text)["collapipe_round",] == rounds and f'run="{name}"' in text


def test_a_control_unit_shows_its_round_its_devices_and_what_was_so_far(tmp_path):
    shown = values(control_unit_text(tmp_path))
    seconds = shown.pop(("collapipe_cu_device_missing_seconds", "0", "silent"))
    assert 3.0 <= seconds < 60.0
    assert 0.0 <= shown.pop(("collapipe_cu_round_seconds",)) < 60.0
    assert shown == {
        ("collapipe_cu_in_round",): 1.0,
        ("collapipe_cu_round",): 2.0,
        ("collapipe_cu_rounds_total",): 1.0,
        ("collapipe_cu_failed_rounds_total",): 0.0,
        ("collapipe_cu_faults_total", "device"): 2.0,
        ("collapipe_cu_faults_total", "stream"): 1.0,
        ("collapipe_cu_bytes_total", "devices"): 300.0,
        ("collapipe_cu_bytes_total", "stream_down"): 10.0,
        ("collapipe_cu_bytes_total", "stream_up"): 20.0,
        ("collapipe_cu_train_loss",): 0.5,
        ("collapipe_cu_round_faults", "device"): 1.0,
        ("collapipe_cu_device_up", "0"): 0.0,
        ("collapipe_cu_device_up", "1"): 1.0,
        # Of device 1 it is not known.
        ("collapipe_cu_device_memory_bytes", "0"): 4096.0,
        ("collapipe_cu_device_busy_seconds", "0"): 1.5,
        ("collapipe_cu_device_busy_seconds", "1"): 0.5,
        ("collapipe_cu_device_blocks", "0"): 2.0,
        ("collapipe_cu_device_blocks", "1"): 1.0,
    }
    later = values(control_unit_metrics(tmp_path / "checkpoints", 2))
    assert (later["collapipe_cu_in_round",], later["collapipe_cu_rounds_total",]) == (0.0, 2.0)
    assert later["collapipe_cu_bytes_total", "devices"] == 600.0
    assert not any(name.endswith(("device_up", "round_faults")) for name, *_ in later)


def test_the_run_that_was_trained_last_is_the_one_that_is_shown(tmp_path):
    for name in ("b", "a"):
        with noted_round(tmp_path / name / "cluster-0", 1) as report:
            report |= REPORT
    os.utime(tmp_path / "b" / "cluster-0" / NOTES, (1.0, 1.0))
    assert 'run="a"' in control_unit_metrics(tmp_path, 0)


def test_a_round_that_failed_is_counted_with_its_faults(tmp_path):
    error = RuntimeError("lost")
    error.faults = [{"kind": "cluster"}]
    with pytest.raises(RuntimeError), noted_round(tmp_path, 1):
        raise error
    notes = read_notes(tmp_path)
    assert (notes.rounds, notes.failed, notes.faults, notes.is_in_round) == (0, 1, {"cluster": 1}, False)


def test_a_round_whose_process_is_gone_does_not_go_on(tmp_path):
    with noted_round(tmp_path, 1):
        begun = json.loads((tmp_path / NOTES).read_text())
    for under_way in ({"pid": 2**22 + 1}, {"since": 1.0}):
        (tmp_path / NOTES).write_text(json.dumps(begun | {"under_way": begun["under_way"] | under_way}))
        assert read_notes(tmp_path).under_way and not read_notes(tmp_path).is_in_round


def test_a_token_outlives_the_program_and_is_for_its_user_alone(tmp_path):
    file = metrics_token(tmp_path / "state")
    token = file.read_text()
    assert len(token) == 33 and metrics_token(tmp_path / "state").read_text() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("short\n")
    with pytest.raises(ValueError, match="at least 16 characters, found 5"):
        metrics_token(tmp_path / "state")


def test_no_token_travels_in_plain_text_to_another_machine(tmp_path):
    [needed] = metrics_ports(metrics_address("10.0.0.1:9096"), has_certificate=True)
    assert (needed.option, needed.host, needed.port) == ("--metrics", "10.0.0.1", 9096)
    with pytest.raises(ValueError, match="--metrics: 10.0.0.1 is reached by others"):
        metrics_ports(metrics_address("10.0.0.1:9096"), has_certificate=False)
    assert metrics_ports(metrics_address("9096"), has_certificate=False)[0].host == "127.0.0.1"


def test_a_machine_is_not_started_with_an_address_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="^--metrics: expected"):
        EdgeServer(host="127.0.0.1", certs=ServerFiles(tmp_path), state=tmp_path, metrics="x")
    with pytest.raises(ValueError, match="^--metrics: expected"):
        ControlUnitBox(
            cluster=0, host="127.0.0.1", server="127.0.0.1", certs=CuFiles(tmp_path), state=tmp_path, metrics="x"
        )


def test_on_the_loopback_one_is_answered_in_plain_text_until_the_programs_end(tmp_path):
    lines = []
    with served_metrics(HostPort("127.0.0.1", 0), one_sample, metrics_token(tmp_path), None, lines.append):
        address = lines[0].split()[1].rstrip(",")
        assert address.startswith("http://127.0.0.1:") and str(tmp_path / "metrics-token") in lines[0]
        token = (tmp_path / "metrics-token").read_text().strip()
        assert token not in lines[0]
        assert values(asked(address, token)) == {("collapipe_round",): 2.0}
        with pytest.raises(urllib.error.HTTPError, match="403"):
            asked(address, token + "x")
    with pytest.raises(urllib.error.URLError):
        asked(address, token)


def test_elsewhere_one_is_answered_under_the_machines_certificate(tmp_path):
    edge_folder(tmp_path)
    files, lines = ServerFiles(tmp_path / "server"), []
    tls = (files.certificate, files.key)
    with served_metrics(HostPort("0.0.0.0", 0), one_sample, metrics_token(tmp_path), tls, lines.append):
        address = lines[0].split()[1].rstrip(",").replace("0.0.0.0", "127.0.0.1")
        token = (tmp_path / "metrics-token").read_text().strip()
        assert address.startswith("https://")
        assert asked(address, token, ssl.create_default_context(cafile=files.ca)) == one_sample()


def test_a_port_that_another_program_has_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = HostPort("127.0.0.1", other.getsockname()[1])
        with (
            pytest.raises(ValueError, match="--metrics: .* cannot be had"),
            served_metrics(place, str, metrics_token(tmp_path), None, print),
        ):
            pass
