"""Refusals before a machine's programs start: foreign addresses, certificates, IPv6."""

import datetime

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.deployment import certificate_authority
from flower_app.deployment.certificate_authority import Authority, read_certificate, write_public, write_secret
from flower_app.deployment.credentials import AuthorityFiles, ServerFiles
from helpers.joining import edge_folder, joined_by_files
from helpers.running_programs import HOST, free_block, free_port

ELSEWHERE = "203.0.113.9"
"""An address for documentation: no machine has it."""


def start_server(certs, host=HOST, *more):
    """Start an edge server; the tests start no program, so that one which is not refused fails otherwise."""
    options = ["--host", host, "--certs", certs / "server", "--port", free_port(), "--state", certs.parent / "state"]
    return CliRunner().invoke(app, [str(option) for option in ("up", "edge-server", *options, *more)])


def start_box(state):
    return CliRunner().invoke(app, ["join", "--state", str(state)])


@pytest.fixture
def certs(tmp_path):
    edge_folder(tmp_path / "certs", ELSEWHERE)
    edge_folder(tmp_path / "certs")
    return tmp_path / "certs"


def joined(certs, role, host=HOST):
    """State of a box that has joined; nobody answers where its edge server would be."""
    state, moved = certs.parent / "unit", {"ray_port": free_block(), "object_store_mb": 80}
    joined_by_files(certs, state, host, **moved)
    if role == "device":
        state = certs.parent / "device"
        joined_by_files(certs, state, host, cluster=0, **moved)
    return state


@pytest.mark.parametrize("role", ["edge-server", "cu", "device"])
def test_an_address_of_another_machine_is_refused_at_once(certs, role):
    done = start_server(certs, ELSEWHERE) if role == "edge-server" else start_box(joined(certs, role, ELSEWHERE))
    assert done.exit_code == 2, done.output
    assert f"error: --host: {ELSEWHERE} is no address of this machine" in done.output


@pytest.mark.parametrize("host", ["fd77::1", "[fd77::1]", "::1"])
def test_ipv6_is_said_under_the_option_that_has_it(certs, tmp_path, host):
    joining = ["join", "x", "--cluster", "0", "--host", host, "--state", str(tmp_path)]
    for done in (start_server(certs, host), CliRunner().invoke(app, joining)):
        assert done.exit_code == 2
        assert f"error: --host: expected a name or an IPv4 address, found {host!r}" in done.output


def test_an_edge_server_that_cannot_start_prints_no_codes(tmp_path):
    """Codes were printed first, and then the server ended."""
    for name, words in (
        ("fd77::1", "--name: expected a name or an IPv4"),
        (ELSEWHERE, "--host: 203.0.113.9 is no addr"),
    ):
        options = ["--name", name, "--certs", tmp_path / "certs" / "server", "--state", tmp_path, "--port", free_port()]
        done = CliRunner().invoke(app, [str(option) for option in ("up", "edge-server", *options)])
        assert done.exit_code == 2 and words in done.output
        assert "collapipe join" not in done.output
        # Nor has it an authority and a certificate for that address.
        assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "0"])
def test_an_address_that_stands_for_all_is_refused_with_those_of_this_machine(tmp_path, host):
    """A code had it, by which a box asked itself."""
    for option, command in (
        ("--name", ["up", "edge-server", "--certs", tmp_path / "certs" / "server", "--state", tmp_path]),
        ("--name", ["invite", "--out", tmp_path / "certs"]),
        ("--host", ["join", "x", "--cluster", "0", "--state", tmp_path]),
    ):
        done = CliRunner().invoke(app, [str(word) for word in (*command, option, host)])
        assert done.exit_code == 2
        assert f"error: {option}: expected the name or address at which others reach this machine" in done.output
        assert HOST in done.output and not (tmp_path / "certs").exists()


def test_two_options_at_one_port_are_told_before_anything_starts(certs):
    """The SuperLink ended 15 s later with a traceback: the metrics had its port."""
    port = free_port()
    done = start_server(certs, HOST, "--control-port", port, "--metrics", port)
    assert done.exit_code == 2
    assert f"error: --metrics: port {port} of {HOST}, for Prometheus, is that of --control-port, too" in done.output


@pytest.mark.parametrize(
    ("days", "backdated", "words"),
    [
        (-2, datetime.timedelta(days=10), "server.pem expired on"),
        (9, -datetime.timedelta(days=3), "is valid only from"),
    ],
)
def test_a_certificate_of_another_time_is_refused_before_anything_starts(certs, monkeypatch, days, backdated, words):
    monkeypatch.setattr(certificate_authority, "_BACKDATED", backdated)
    files = ServerFiles(certs / "server")
    certificate, key = Authority.load(AuthorityFiles(certs / "authority")).issue_server([HOST], days)
    write_public(files.certificate, certificate)
    write_secret(files.key, key)
    done = start_server(certs)
    assert done.exit_code == 2 and "error: --certs: " in done.output and words in done.output
    run = CliRunner().invoke(app, ["run", "--superlink", f"{HOST}:{free_port()}", "--certs", str(files.folder)])
    assert run.exit_code == 2 and "error: --certs: " in run.output and words in run.output


@pytest.mark.parametrize(("role", "name"), [("cu", "cu.pem"), ("cu", "cluster.pem"), ("device", "node.pem")])
def test_boxes_refuse_certificates_of_another_time(certs, monkeypatch, role, name):
    state = joined(certs, role)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return read_certificate(state / "joined" / name).not_valid_after_utc + datetime.timedelta(days=1)

    monkeypatch.setattr("flower_app.deployment.certificate_checks.datetime.datetime", Later)
    done = start_box(state)
    assert done.exit_code == 2 and "error: --state: " in done.output and ".pem expired on" in done.output


def test_a_box_that_has_joined_does_not_pass_over_another_host(certs):
    state = joined(certs, "cu")
    for code in ([], [str(state / "box.invite")]):
        done = CliRunner().invoke(app, ["join", *code, "--control-unit", "--host", ELSEWHERE, "--state", str(state)])
        assert done.exit_code == 2
        expected = f"error: --host: cu-0 has joined as {HOST}, which its certificate is for, found {ELSEWHERE}"
        assert expected in done.output
