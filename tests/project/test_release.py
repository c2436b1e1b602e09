"""A release: its list of contents, its citation, its wheel, and an installation outside a checkout that trains."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from flower_app.launch.app_folder import BESIDE, PACKAGES
from helpers.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FACTS = [
    "print(sorted(run.metrics))",
    "print(run.predict(['the dog sleeps']))",
    "scores = run.evaluate().metrics",
    "print(all(scores[name] == value for name, value in run.metrics.items() if name != 'loss'))",
    "print(run.report().name, len(run.rounds))",
]
"""Questions of a script to the run that it has trained."""
USE = """
from pathlib import Path
from flower_app.launch.app_folder import assemble_app
from flower_app.config.sources import load_config
from flower_app.launch.preflight import check_run

assert load_config("multi30k-tiny").name == "multi30k-tiny"
assert check_run(load_config(None, ["scenario=two-clusters"])) == 2
app = assemble_app(Path(%r))
print(*sorted(path.relative_to(app).as_posix() for path in app.rglob("*") if path.is_file()), sep="\\n")
"""


def test_the_list_of_contents_is_that_of_the_lock():
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy" / "sbom.py")
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    written = sbom.SBOM.read_text(encoding="utf-8")
    assert written == sbom.text(), "write it anew: python deploy/sbom.py"
    document = json.loads(written)
    locked = re.findall(r"^([\w.-]+)==([^\s;\\]+)", sbom.LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(c["name"], c["version"]) for c in document["components"]] == locked
    assert all(c["externalReferences"][0]["hashes"] for c in document["components"])
    assert document["metadata"]["component"]["version"] == PROJECT["version"]


def test_the_citation_names_the_release():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {PROJECT['version']}\n" in citation and "2509.19855" in citation
    assert (ROOT / "SECURITY.md").is_file()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The sdist of a copy of the tracked files, and the wheel that is built of it."""
    for module in ("hatchling", "pip"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [sdist] = folder.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], check=True)
    [wheel] = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_sdist_holds_sources_tests_and_pages_and_nothing_of_this_machine(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"flower_app/python_api.py", "configs/trec6.toml", "tests/project/test_release.py", "docs/index.md"}
    assert wanted | {"LICENSE", "README.md", "mkdocs.yml", "deploy/sbom.cdx.json"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", ".ci", "build/"))]


@pytest.fixture
def in_empty_folder(archives, tmp_path):
    """Run code in an empty folder, with the wheel in front of the editable installation; returns what it printed."""
    with zipfile.ZipFile(archives[1]) as archive:
        archive.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(code):
        check = f"import flower_app; assert flower_app.__file__.startswith({str(tmp_path / 'installed')!r})"
        (empty / "script.py").write_text(f"{check}\n{code}\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=1100)
        assert done.returncode == 0, done.stderr[-3000:]
        return empty, done

    return run


def sources():
    found = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".toml")}
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_the_project_file_alone(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    library = ("LICENSE", "uPlot.iife.min.js", "uPlot.min.css")
    files = ("index.html", "watch.css", "watch.js", *(f"uplot/{name}" for name in library))
    pages = {f"flower_app/watch/page/{name}" for name in files}
    pages |= {f"flower_app/serving/page/{name}" for name in ("index.html", "chat.css", "chat.js")}
    assert names == sources() | pages | {f"configs/app/{name}" for name in ("pyproject.toml", *BESIDE)}


@pytest.mark.slow
def test_an_unpacked_wheel_finds_its_configurations_and_makes_the_whole_app(in_empty_folder, tmp_path):
    _, done = in_empty_folder(USE % str(tmp_path / "app"))
    assert set(done.stdout.splitlines()) == sources() | {"pyproject.toml", *BESIDE}
    assert (tmp_path / "app" / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_of(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    # What is run here leaves no traces in the file.
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_two_notebooks_and_their_cells_are_code():
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        compile(code_of(notebook), str(notebook), "exec")


EXPECTED = {
    "first-run": ("['bleu', 'chrf', 'loss']", "report.html 3"),
    "own-text": ("['accuracy', 'loss', 'macro_f1']", "report.html 4"),
}
"""Metrics of a notebook's run, and its report and number of rounds."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_as_a_script_with_the_wheel_of_the_sdist_in_an_empty_folder(
    notebook, in_empty_folder
):
    empty, done = in_empty_folder("\n".join([code_of(notebook), *FACTS]))
    assert json.loads((empty / "runs" / "latest" / "summary.json").read_text())["status"] == "finished"
    metrics, predictions, same, report = done.stdout.splitlines()[-4:]
    assert (metrics, report) == EXPECTED[notebook.stem] and same == "True"
    assert predictions.startswith("['") and (empty / "runs" / "latest" / "model").is_dir()
    # Who takes the rounds himself gets no lines.
    lines = {"start-up: Flower's programs", "round 4/4"}
    assert {line for line in lines if line in done.stderr} == (lines if notebook.stem == "own-text" else set())
