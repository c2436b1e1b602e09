"""A file of the user's with the name of a package is named in one line, instead of the import that fails by it."""

import os
import subprocess
import sys

import pytest

from helpers.repository import ROOT

pytestmark = pytest.mark.slow


def started(folder, *arguments):
    """Start Python in a folder that comes before all installed packages."""
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *path, str(ROOT)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["strategies", "configs", "client_pipeline", "ray", "flwr"])
def test_a_file_that_stands_in_the_place_of_a_package_is_named(tmp_path, name):
    file = tmp_path / f"{name}.py"
    file.write_text("")
    line = f"{file} stands in the place of the package {name}, which CollaPipe needs; rename it"
    imported = started(tmp_path, "-c", "from flower_app import train")
    assert imported.returncode == 1
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: {line}")
    command = started(tmp_path, "-m", "flower_app.cli", "run", "--help")
    assert command.returncode == 2
    assert [each for each in command.stderr.splitlines() if not each.startswith(f"error: {line}")] == []


def test_a_package_that_stands_in_the_place_of_ours_is_named(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("")
    imported = started(tmp_path, "-c", "from flower_app import train")
    assert f"{tmp_path / 'configs' / '__init__.py'} stands in the place of the package" in imported.stderr
