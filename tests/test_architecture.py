"""Imports run one way, and heavy libraries stay behind their doors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["client_pipeline", "strategies", "flower_app"]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def files(package):
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_no_package_imports_one_above_it(package):
    above = set(LAYERS[LAYERS.index(package) + 1 :]) | {"tests", "benchmarks"}
    wrong = [(str(f), name) for f in files(package) for name in imported(f) if name.split(".")[0] in above]
    assert not wrong


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("ray", ("client_pipeline/runtime/",)),
        ("cvxpy", ("strategies/dssda/",)),
        ("flwr", ("strategies/", "flower_app/")),
        ("grpc", ("client_pipeline/link/", "strategies/decoder/service.py")),
    ],
)
def test_heavy_libraries_are_imported_behind_one_door(library, allowed):
    for package in LAYERS:
        for file in files(package):
            if library in {name.split(".")[0] for name in imported(file)}:
                relative = file.relative_to(ROOT).as_posix()
                assert relative.startswith(allowed), f"{relative} imports {library}"


def test_nothing_unpickles():
    for package in LAYERS:
        for file in files(package):
            assert not {"pickle", "cloudpickle", "dill"} & set(imported(file)), file
            assert "torch.load(" not in file.read_text(encoding="utf-8"), file


def test_importing_the_packages_loads_neither_flower_nor_torch():
    code = (
        "import sys, client_pipeline, strategies, flower_app, client_pipeline.partition.plan, "
        "client_pipeline.system.scenario; print([m for m in ('torch', 'flwr', 'ray') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
