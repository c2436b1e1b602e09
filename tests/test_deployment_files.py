"""The commands in ``deploy/`` and in ``docs/deployment.md`` are ones that the command line takes."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from flower_app.cli import app
from flower_app.config_sources import load_config
from flower_app.deployment import commands, control_unit_box, device_box, edge_server, ray_node
from flower_app.node import KEYS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def in_page():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    found = [line for block in blocks for line in block.splitlines() if re.match(r"(\w+=\S+ )*collapipe ", line)]
    found += re.findall(r"`(collapipe (?:certs|run|profile) [^`]*?--[^`]*)`", PAGE)
    return [re.sub(r".*?(?=collapipe )", "", " ".join(line.split()), count=1) for line in found]


def in_units():
    for unit in sorted((ROOT / "deploy" / "systemd").glob("*.service")):
        text = unit.read_text(encoding="utf-8")
        (start,) = re.findall(r"^ExecStart=/opt/collapipe/bin/(.*)$", text, re.MULTILINE)
        (example,) = re.findall(r"^# COLLAPIPE_OPTIONS=(.*)$", text, re.MULTILINE)
        yield start.replace("$COLLAPIPE_OPTIONS", example)


def in_compose():
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    yield from (f"collapipe {command}" for command in re.findall(r"^\s+command: (.*)$", text, re.MULTILINE))


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
        for kind in ("edge-server", "cu", "device"):
            assert any(f"up {kind} " in line for line in where), kind


def test_the_page_names_the_ports_that_are_taken_by_default():
    for port in (edge_server.SUPERLINK_PORT, control_unit_box.RUNTIME_PORT, ray_node.FIRST_PORT, 9443):
        assert re.search(rf"\b{port}\b", PAGE), port
    assert f"{ray_node.FIRST_PORT} to {ray_node.FIRST_PORT + ray_node.PORTS - 1}" in PAGE


def test_defaults_of_the_commands_are_those_of_the_programs():
    assert commands._SUPERLINK_PORT == edge_server.SUPERLINK_PORT
    assert commands._RAY_PORT == ray_node.FIRST_PORT
    assert commands._RUNTIME_PORT == control_unit_box.RUNTIME_PORT
    fields = device_box.DeviceBox.__dataclass_fields__
    assert commands._WAIT_S == fields["wait"].default
    assert commands._OBJECT_STORE_MB == fields["object_store_mb"].default


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
