"""The commands in ``deploy/`` and in the deployment's pages are ones that the command line takes."""

import os
import re
import shlex
import tomllib

import pytest
import typer
import yaml
from typer.testing import CliRunner

from client_pipeline.link.hosts import is_loopback
from flower_app.cli import deployment_commands as commands
from flower_app.cli.main import app
from flower_app.config.sources import load_config
from flower_app.deployment import control_unit_box, device_box, edge_server, ray_node
from flower_app.deployment.metrics_door import metrics_address
from flower_app.joining import join_code
from flower_app.node.config import KEYS
from helpers.joining import edge_folder, joined_by_files
from helpers.repository import ROOT

PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("deployment", "deployment-reference"))


def in_page():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    found = [line for block in blocks for line in block.splitlines() if re.match(r"(\w+=\S+ )*collapipe ", line)]
    found += re.findall(r"`(collapipe (?:join|invite|run|profile) [^`]*?--[^`]*)`", PAGE)
    return [re.sub(r".*?(?=collapipe )", "", " ".join(line.split()), count=1) for line in found]


def in_units():
    for unit in sorted((ROOT / "deploy" / "systemd").glob("*.service")):
        text = unit.read_text(encoding="utf-8")
        (start,) = re.findall(r"^ExecStart=/opt/collapipe/bin/(.*)$", text, re.MULTILINE)
        (example,) = re.findall(r"^# COLLAPIPE_OPTIONS=(.*)$", text, re.MULTILINE)
        yield start.replace("$COLLAPIPE_OPTIONS", example)


def in_compose():
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    for command in re.findall(r"^\s+command: (.*)$", text, re.MULTILINE):
        yield "collapipe " + re.sub(r"\$\{\w+-\}", "CODE", command)


def parsed(line):
    """Have the command line read a command, and run nothing."""
    command, arguments = typer.main.get_command(app), shlex.split(line)[1:]
    context = None
    while True:
        context = command.make_context(arguments[0], arguments if context is None else arguments[1:], parent=context)
        if not hasattr(command, "commands"):
            return context.params
        arguments = [*context._protected_args, *context.args]
        command = command.commands[arguments[0]]


@pytest.mark.parametrize("line", [*in_page(), *in_units(), *in_compose()])
def test_a_command_is_one_that_we_take(line):
    assert parsed(line.replace("RUN", "latest"))


def test_there_are_commands_for_every_machine():
    for where in (in_page(), list(in_units()), list(in_compose())):
        for command in ("up edge-server ", "join "):
            assert any(line.startswith(f"collapipe {command}") for line in where), command


def test_the_page_names_the_ports_that_are_taken_by_default():
    for port in (edge_server.SUPERLINK_PORT, control_unit_box.RUNTIME_PORT, ray_node.FIRST_PORT, 9443):
        assert re.search(rf"\b{port}\b", PAGE), port
    assert edge_server.control_address(edge_server.SUPERLINK_PORT) in PAGE
    assert f"{ray_node.FIRST_PORT} to {ray_node.FIRST_PORT + ray_node.PORTS - 1}" in PAGE


def test_defaults_of_the_commands_are_those_of_the_programs():
    assert commands._SUPERLINK_PORT == edge_server.SUPERLINK_PORT
    assert commands._REPLY_MB == edge_server.REPLY_MB
    assert (commands._JOIN_PORT, commands._CODE_MINUTES) == (join_code.JOIN_PORT, join_code.LIFETIME_MINUTES)
    assert commands._RAY_PORT == ray_node.FIRST_PORT
    assert commands._RUNTIME_PORT == control_unit_box.RUNTIME_PORT
    fields = device_box.DeviceBox.__dataclass_fields__
    assert commands._OBJECT_STORE_MB == fields["object_store_mb"].default


def test_prometheus_asks_every_machine_with_a_token_and_others_than_this_one_under_tls():
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["collapipe-edge-server", "collapipe-cu-0", "collapipe-cu-1"]
    for job in jobs:
        assert job["authorization"]["credentials_file"]
        ((target,),) = (config["targets"] for config in job["static_configs"])
        address = metrics_address(target)
        is_local = is_loopback(address.host)
        assert is_local or (job["scheme"] == "https" and job["tls_config"]["ca_file"])
        option = f"--metrics {address.port if is_local else address}"
        assert any(f"{option} " in f"{line} " for line in in_page()) or job["job_name"] == "collapipe-cu-1"


def test_the_page_names_every_key_of_a_node():
    for key in KEYS:
        assert f"`{key}`" in PAGE, key


def test_the_pages_own_configuration_is_one(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(text)
    config = load_config(str(file))
    assert config.data.partition == "nodes" and config.data.path == "/srv/held-out"
    assert config.scenario == "edge-boxes" and tomllib.loads(text)["data"]["tokenizer"] == "/srv/tokenizer"


@pytest.mark.parametrize("kind", ["edge-server", "cu", "device"])
def test_what_a_machine_writes_is_for_its_own_user_alone(kind, tmp_path, monkeypatch):
    state = tmp_path / "state"

    def up(machine, say):
        edge_server.write_connection(state / "flower", "here:1", tmp_path / "ca.pem")
        (state / "superlink.db").touch()
        return 0

    for box in (edge_server.EdgeServer, control_unit_box.ControlUnitBox, device_box.DeviceBox):
        monkeypatch.setattr(box, "up", up)
    if kind == "edge-server":
        arguments = ["up", "edge-server", "--name", "127.0.0.1", "--certs", str(tmp_path / "certs" / "server")]
    else:
        edge_folder(tmp_path / "certs")
        joined_by_files(tmp_path / "certs", tmp_path / "unit")
        if kind == "cu":
            (tmp_path / "unit").rename(state)
        else:
            joined_by_files(tmp_path / "certs", state, cluster=0)
        arguments = ["join", "--state", str(state)]
    before = os.umask(0o022)
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    written = [state / "flower", state / "flower" / "config.toml", state / "superlink.db"]
    assert [path.stat().st_mode & 0o777 for path in written] == [0o700, 0o600, 0o600]
