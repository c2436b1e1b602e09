"""Every command of the pages can be given as it stands; one that no test runs says what it needs.

A command is marked by a word in capitals that is the reader's to fill in (``FOLDER``), by ``...``, by ``needs:`` in its
block, paragraph or table row, by the column ``needs`` of its table, or by a line ``*needs: ...*`` of its section. All
others run here, one after the other, in a folder with a user's tables; a training has two rounds.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib

import click
import pytest
import typer
from typer.testing import CliRunner

from experiments.reproduce import app as reproduce
from flower_app.cli.main import app as collapipe
from flower_app.config.other_names import OTHER_NAMES
from flower_app.config.run_config import key_types
from flower_app.config.sources import find_config, load_config
from helpers.page_commands import click_command, page_commands
from helpers.repository import ROOT

COMMANDS = list(page_commands())
GIVEN = list({command.text: command for command in COMMANDS if not command.is_name}.values())
RUN_HERE = [command for command in COMMANDS if not command.is_name and not command.is_marked]


def options_of(program, words):
    """Options and values of a call, by the tool's own parser: a word that it does not know is an error."""
    command = click_command(program)
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        if name.startswith("-"):
            return {}
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    if isinstance(command, click.Group):
        return {}
    if command.name == "reproduce":
        # It passes its arguments on to this program.
        command = typer.main.get_command(reproduce)
    options, _, _ = command.make_parser(click.Context(command)).parse_args(list(words))
    return options


def check_collapipe(words):
    options = options_of("collapipe", words)
    sets = [pair for pair in options.get("sets") or () if not re.search(r"=.*\b[A-Z]{3,}\b", pair)]
    for pair in options.get("sets") or ():
        key = pair.partition("=")[0]
        known = {*key_types(), *OTHER_NAMES}
        assert key in known or any(name.startswith(f"{key}.") for name in known), key
    config = options.get("config")
    if config and not config.endswith(".toml"):
        find_config(config)
    if "superlink" in options or "config" in options:
        load_config(None, [pair for pair in sets if not pair.startswith(("plan=", "task.name=acceptability"))])


def check_python(words):
    if words[0] == "-c":
        compile(words[1], "page", "exec")
    elif words[0] == "-m":
        assert words[1] == "venv" or importlib.util.find_spec(words[1]), words[1]
    else:
        text = (ROOT / words[0]).read_text(encoding="utf-8")
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        assert not [word for word in own if word.startswith("--") and f'"{word}"' not in text]


def check_pip(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"(?:collapipe|\.)\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(project["optional-dependencies"])


def check_pytest(words):
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


CHECKS = {
    "collapipe": check_collapipe,
    "flwr": lambda words: options_of("flwr", words),
    "python": check_python,
    "python3": check_python,
    "pip": check_pip,
    "pytest": check_pytest,
}


@pytest.mark.parametrize("command", GIVEN, ids=str)
def test_a_command_of_the_pages_can_be_given(command):
    text = command.text.replace("...", "").replace("COMMAND ", "")
    if " pip " not in f" {text}":
        text = re.sub(r"[\[\]]", "", text)
    for part in text.partition(" | ")[0].split(" && "):
        words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", part.partition(" > ")[0]))
        if words and (check := CHECKS.get(words.pop(0).removeprefix(".venv/bin/"))):
            check(words)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.is_name], ids=str)
def test_a_command_that_is_named_exists(command):
    program, *words = command.text.split()
    tool = click_command(program)
    while words and not words[0].startswith("--"):
        tool = tool.commands[words.pop(0)]
    assert set(words) <= {option for parameter in tool.params for option in parameter.opts}


def test_there_are_commands_to_check():
    assert len(GIVEN) > 150 and len(RUN_HERE) > 15
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/guide.md", "docs/deployment.md"}


def test_what_no_test_runs_says_what_it_needs():
    """Run commands of ours and their preparations; start no program of somebody else."""
    ours = re.compile(r"collapipe |python -[cm] ")
    assert not [str(command) for command in RUN_HERE if not ours.match(command.text)]


def train_for_seconds(file):
    """Have fewer rounds in a file of ``collapipe init``, as its comments invite to."""
    text, changes = re.subn(r"(?m)^(num-rounds|evaluate-every) = \d+", r"\1 = 2", file.read_text())
    assert changes == 2
    file.write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_command_without_needs_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(f"{word} of number {i}", kind) for i in range(40) for word, kind in (("name", "who"), ("size", "how"))]
    table = "".join(f"what is the {text},{kind}\n" for text, kind in rows)
    (tmp_path / "train.csv").write_text(f"text,kind\n{table}")
    (tmp_path / "in.csv").write_text("text\nwhat is the size of number 9\n")
    (tmp_path / "questions.csv").write_text(f"question,kind\n{table}")
    done = set()
    for command in RUN_HERE:
        text = re.sub(r"\bRUN\b", "latest", command.text)
        if text in done:
            continue
        done.add(text)
        program, *words = shlex.split(text)
        # A program of its own for each would import torch fifteen times; a run starts enough others.
        if program == "collapipe" and words[0] != "run":
            outcome = CliRunner().invoke(collapipe, words)
            assert outcome.exit_code == 0, f"{command}\n{outcome.output[-3000:]}\n{outcome.exception!r}"
            if words == ["init", "train.csv"]:
                train_for_seconds(tmp_path / "collapipe.toml")
            continue
        start = [sys.executable, "-m", "flower_app.cli"] if program == "collapipe" else [sys.executable]
        if words[0] == "run" and "num-rounds" not in text and "latest" not in text:
            words += ["--set", "num-rounds=2"]
        call = subprocess.run([*start, *words], cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert call.returncode == 0, f"{command}\n{call.stderr[-3000:]}"
