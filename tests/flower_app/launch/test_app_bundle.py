"""Contents of the built app: all that it needs, and nothing of the tests."""

import importlib
import io
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest

from flower_app.launch.app_folder import PACKAGES, assemble_app, project_file
from helpers.repository import ROOT


def _bundled(folder):
    from flwr.cli.build import build_fab_from_disk

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))) as bundle:
        return set(bundle.namelist())


def _wanted():
    sources = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".toml")}
    return {path.relative_to(ROOT).as_posix() for path in sources} | {
        "pyproject.toml",
        "LICENSE",
        ".info/CONTENT",
    }


def _past_runs(folder):
    return {"runs"} if Path(folder) == ROOT else set()


def test_a_bundle_of_the_repository_holds_the_packages_and_configurations_alone(tmp_path):
    # Not the checkout itself: beside the sources it may hold a whole environment, and Flower reads every file.
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.fab")
    repository = shutil.copytree(
        ROOT, tmp_path / "repository", ignore=lambda folder, names: skipped(folder, names) | _past_runs(folder)
    )
    found = _bundled(repository)
    assert found == _wanted()
    assert {"flower_app/server_app.py", "configs/scenarios/default.toml", "configs/multi30k-tiny.toml"} <= found
    assert not [name for name in found if name.startswith(("tests", "benchmarks", "docs"))]


def test_the_app_folder_of_a_run_makes_the_same_bundle(tmp_path):
    assert _bundled(assemble_app(tmp_path / "app")) == _wanted()


def test_the_app_folder_fits_the_flower_hub(tmp_path):
    from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

    # The package has a function of this name too.
    publish = importlib.import_module("flwr.cli.app_cmd.publish")
    app = assemble_app(tmp_path / "app")
    config = tomllib.loads((app / "pyproject.toml").read_text())
    metadata = normalize_and_validate_fab_format(config)
    assert (metadata.fab_format_version, metadata.flwr_version_target) == (1, "1.41.0")
    assert config["tool"]["flwr"]["app"]["display-name"] == "CollaPipe"
    publish._validate_description(config["project"]["description"])
    assert len(config["project"]["description"]) <= 200
    publish._validate_app_name(config["project"]["name"], "app")
    files = publish._collect_file_paths(app)
    publish._validate_files(files)
    names = {path.relative_to(app).as_posix() for path in files}
    assert {"LICENSE", "README.md", "pyproject.toml", "flower_app/server_app.py"} <= names


def test_the_app_folder_of_an_installed_wheel_takes_theproject_file_from_the_package_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="found no pyproject.toml of the app; install the package again"):
        project_file(tmp_path)
    (tmp_path / "configs" / "app").mkdir(parents=True)
    (tmp_path / "configs" / "app" / "pyproject.toml").touch()
    assert project_file(tmp_path) == tmp_path / "configs" / "app" / "pyproject.toml"
