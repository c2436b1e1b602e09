"""Where tests stand: folders mirror the packages, helpers have one folder, and no test imports another."""

import ast

from helpers.repository import ROOT, imports_of

TESTS = ROOT / "tests"
PACKAGES = ("client_pipeline", "strategies", "flower_app")
OTHER_FOLDERS = {"helpers", "project", "whole"}
"""What serves all tests; tests of the repository itself; tests of several packages at work together."""


def imported_modules(path):
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_folder_of_tests_is_that_of_a_package():
    for path in TESTS.rglob("*.py"):
        folder = path.parent.relative_to(TESTS)
        if path.name == "conftest.py" or folder.as_posix() in OTHER_FOLDERS:
            continue
        assert folder.parts[0] in PACKAGES and (ROOT / folder).is_dir(), f"{path}: no package {folder}"
        assert path.name.startswith("test_"), f"{path}: what is no test belongs in tests/helpers"


def test_a_test_files_name_stands_once():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) > 100 and len(set(names)) == len(names)


def test_the_folders_are_no_packages():
    """An ``__init__.py`` would hide the real packages, for ``tests`` is on the path."""
    assert list(TESTS.rglob("__init__.py")) == []


def test_no_test_and_no_benchmark_imports_a_test():
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    for path in [*TESTS.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in imported_modules(path):
            assert not modules & set(name.split(".")), f"{path} imports {name}"
