"""The page that says where things are: every file and name is there, and no equation, command or fault is left out."""

import ast
import re

import pytest
import typer

from client_pipeline.runtime.fault_config import INJECTED_KINDS
from flower_app.cli.main import app
from helpers.repository import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = [
    (question, path, name.removeprefix(path.rpartition("/")[2].removesuffix(".py")).removeprefix("."))
    for question, name, path in re.findall(r"^\| (.+?) \| \[([\w.]+)\]\(\.\./([\w/.]+)\) \|$", PAGE, re.M)
]
"""Question, file, and the class or function in it; empty for the file as a whole."""


def defined(path):
    """Names of the classes, functions and methods of a module."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
            if isinstance(node, ast.FunctionDef):
                # Commands are functions within the one that registers them.
                names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("question", "path", "name"), ROWS)
def test_what_is_named_is_there(question, path, name):
    assert (ROOT / path).is_file()
    assert not name or name in defined(path)


def test_every_table_row_is_read():
    assert len(ROWS) == len(re.findall(r"^\| .*\]\(\.\./", PAGE, re.M)) >= 40


def test_paths_in_the_text_are_there():
    paths = set(re.findall(r"`((?:client_pipeline|strategies|flower_app|tests)/[\w/.]+)`", PAGE))
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_no_equation_of_the_paper_is_left_out():
    found = {int(n) for question, _, _ in ROWS for n in re.findall(r"\((\d+)\)", question)}
    assert found == set(range(1, 45))


def test_no_command_is_left_out():
    group = typer.main.get_command(app)
    commands = {question.split()[1].strip("`") for question, _, _ in ROWS if question.startswith("`collapipe ")}
    assert commands == set(group.commands)


def test_no_kind_of_fault_is_left_out():
    kinds = {found.group(1) for question, _, _ in ROWS if (found := re.match(r"`([a-z]+)`: ", question))}
    assert kinds == set(INJECTED_KINDS)
