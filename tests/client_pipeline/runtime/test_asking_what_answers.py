"""What a program learns of a Ray address by a process of its own: its command, its secret, and every kind of answer."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from client_pipeline.runtime import ray_probe
from client_pipeline.runtime.ray_probe import probe


@pytest.fixture
def asked(monkeypatch):
    """Commands that would run, with their options, and what they print."""
    seen = SimpleNamespace(commands=[], stdout="", stderr="", code=0, hangs=False)

    def run(command, **options):
        seen.commands.append((command, options))
        if seen.hangs:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return SimpleNamespace(stdout=seen.stdout, stderr=seen.stderr, returncode=seen.code)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_the_last_object_that_is_printed_is_the_answer(asked):
    asked.stdout = 'a line of Ray\n{"ray": "1"}\n{"ray": "2", "devices": {}}\nanother\n'
    assert probe("10.0.0.1:6379") == {"ray": "2", "devices": {}}
    [(command, options)] = asked.commands
    assert command == [sys.executable, "-m", "client_pipeline.runtime.ray_probe", "10.0.0.1:6379"]
    assert options["timeout"] == ray_probe.TIMEOUT_S and options["env"]["RAY_USAGE_STATS_ENABLED"] == "0"
    assert options["capture_output"] and options["text"]


def test_with_a_node_here_its_address_goes_along(asked):
    asked.stdout = "{}"
    probe("10.0.0.1:6379", own_host="10.0.0.2", timeout_s=3.0)
    [(command, options)] = asked.commands
    assert command[-2:] == ["10.0.0.1:6379", "10.0.0.2"] and options["timeout"] == 3.0


def test_a_secret_in_a_file_comes_in_the_place_of_any_other(asked, monkeypatch, tmp_path):
    asked.stdout = "{}"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    probe("10.0.0.1:6379", token=tmp_path / "token")
    probe("10.0.0.1:6379")
    with_file, without = (options["env"] for _, options in asked.commands)
    assert with_file["RAY_AUTH_MODE"] == "token" and with_file["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "RAY_AUTH_TOKEN" not in with_file and with_file["PATH"]
    assert without["RAY_AUTH_TOKEN"] == "another" and without.get("RAY_AUTH_TOKEN_PATH") is None


def test_a_process_without_an_answer_says_why(asked):
    asked.stdout, asked.stderr, asked.code = "no object\n", "first\n  the reason \n", 1
    assert probe("10.0.0.1:6379") == {"error": "  the reason"}
    asked.stderr, asked.code = " \n", -9
    assert probe("10.0.0.1:6379") == {"error": "exit code -9"}
    asked.hangs = True
    assert probe("10.0.0.1:6379", timeout_s=2.5) == {"error": "no answer within 2.5 s"}


def answer(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ray_probe", *arguments])
    ray_probe.main()
    return json.loads(capsys.readouterr().out)


def test_without_a_node_here_only_the_head_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(ray_probe, "versions", lambda address: {"ray": address})
    assert answer(monkeypatch, capsys, "10.0.0.1:6379") == {"ray": "10.0.0.1:6379"}


def test_with_a_node_here_the_devices_are_asked_what_they_run(monkeypatch, capsys):
    from client_pipeline.runtime import actors, device_nodes, placement

    joined = []
    monkeypatch.setattr(ray_probe, "versions", lambda address: {"ray": "2"})
    monkeypatch.setattr(actors, "join_ray", joined.append)
    monkeypatch.setattr(device_nodes, "joined_devices", lambda: {0: "10.0.0.3"})
    monkeypatch.setattr(device_nodes, "device_software", lambda devices, timeout_s: {k: timeout_s for k in devices})
    found = answer(monkeypatch, capsys, "10.0.0.1:6379", "10.0.0.2")
    assert found == {"ray": "2", "devices": {"0": "10.0.0.3"}, "software": {"0": ray_probe.TIMEOUT_S / 2}}
    assert joined == [placement.Placement(ray_address="10.0.0.1:6379", host="10.0.0.2")]


def test_an_error_is_an_answer_too(monkeypatch, capsys):
    def fails(address):
        raise OSError("no route")

    monkeypatch.setattr(ray_probe, "versions", fails)
    assert answer(monkeypatch, capsys, "10.0.0.1:6379") == {"error": "OSError: no route"}
