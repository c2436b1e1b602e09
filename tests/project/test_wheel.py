"""The wheel holds all that a run needs: configurations and the app's ``pyproject.toml`` too."""

import importlib.util
import os
import subprocess
import sys
import zipfile

import pytest

from flower_app.launch.app_folder import BESIDE, PACKAGES
from helpers.repository import ROOT

pytestmark = pytest.mark.slow

USE = """
import sys
from pathlib import Path
import flower_app
from flower_app.launch.app_folder import assemble_app
from flower_app.config.sources import load_config
from flower_app.launch.preflight import check_run

assert Path(flower_app.__file__).is_relative_to(sys.argv[1]), flower_app.__file__
assert load_config("multi30k-tiny").name == "multi30k-tiny"
assert check_run(load_config(None, ["scenario=two-clusters"])) == 2
app = assemble_app(Path(sys.argv[2]))
print(*sorted(path.relative_to(app).as_posix() for path in app.rglob("*") if path.is_file()), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for module in ("hatchling", "pip"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    [built] = folder.glob("*.whl")
    return built


def sources():
    found = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".toml")}
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_wheel_holds_the_packages_and_the_project_file_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    library = ("LICENSE", "uPlot.iife.min.js", "uPlot.min.css")
    files = ("index.html", "watch.css", "watch.js", *(f"uplot/{name}" for name in library))
    page = {f"flower_app/watch/page/{name}" for name in files}
    assert names == sources() | page | {f"configs/app/{name}" for name in ("pyproject.toml", *BESIDE)}


def test_an_unpacked_wheel_finds_its_configurations_and_makes_the_whole_app(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    # In front of the editable installation, and far from the checkout.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", USE, tmp_path / "installed", tmp_path / "app"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == sources() | {"pyproject.toml", *BESIDE}
    assert (tmp_path / "app" / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()
