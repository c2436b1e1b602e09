"""Imports run one way, and heavy libraries stay behind their doors."""

import ast
import re
import subprocess
import sys

import pytest

from helpers.repository import ROOT, imports_of

LAYERS = ["client_pipeline", "strategies", "flower_app"]


def imported(file):
    for node in imports_of(file):
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
    above = set(LAYERS[LAYERS.index(package) + 1 :]) | {"tests", "benchmarks", "experiments"}
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


PUBLIC_FLOWER = {
    "flwr",
    "flwr.app",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.simulation",
}


def test_what_is_not_public_of_flower_comes_through_one_door():
    door = ROOT / "strategies" / "flower_internals.py"
    for package in LAYERS:
        for file in files(package):
            flower = {name for name in imported(file) if name.split(".")[0] == "flwr"}
            assert file == door or flower <= PUBLIC_FLOWER, f"{file}: import this from strategies.flower_internals"


HEAVY = ("torch", "ray", "flwr", "transformers", "datasets")
WORKER = "import {}; from client_pipeline.runtime.control_unit.actors import train_round"
LIGHT = {
    "door to Flower": (
        "import strategies.flower_internals as door; assert 'flwr' not in sys.modules; door.ObjectPushError",
        ("flwr.superlink", "flwr.supernode", "flwr.cli."),
    ),
    "packages": (
        "import strategies, flower_app, client_pipeline.partition.plan, client_pipeline.system.scenario",
        (*HEAVY, "flower_app.python_api"),
    ),
    "help": (
        "from typer.testing import CliRunner; from flower_app.cli.main import app; "
        "assert 'translate' in CliRunner().invoke(app, ['--help']).stdout",
        HEAVY,
    ),
    # Flower's workers: with torch and the planner each took three seconds of processor time and 200 MB more.
    "client app": (WORKER.format("flower_app.client_app"), ("torch", "transformers", "scipy", "cvxpy")),
    "session app": (WORKER.format("flower_app.launch.session_app"), ("torch", "transformers", "scipy", "cvxpy")),
}
"""Code of a program, and the modules that it must not load."""


@pytest.mark.slow
@pytest.mark.parametrize("program", LIGHT)
def test_a_program_loads_only_what_it_uses(program):
    code, heavy = LIGHT[program]
    looked = f"import sys; {code}; print([m for m in sys.modules if m.startswith({heavy!r})])"
    result = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


# Rooms: a package's folders, and each of its modules that lies in no folder.


def rooms_of(package):
    """Each room of a package with those that it imports, and the line of source that says so."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files(package)}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}

    def room(module):
        return ".".join(module.split(".")[:2])

    arrows = {}
    for name, file in modules.items():
        for node in imports_of(file):
            if isinstance(node, ast.Import):
                imports = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imports = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                raise AssertionError(f"{file}: a relative import hides where it leads")
            for target in imports:
                while target and target not in modules:
                    target = target.rpartition(".")[0]
                if target and room(target) not in (package, room(name)):
                    arrows.setdefault(room(name), {}).setdefault(room(target), f"{name} imports {target}")
    return arrows


def reached(arrows, start):
    rooms, queue = set(), [start]
    while queue:
        for room in arrows.get(queue.pop(), ()):
            if room not in rooms:
                rooms.add(room)
                queue.append(room)
    return rooms


@pytest.mark.parametrize("package", LAYERS)
def test_no_room_imports_itself_by_way_of_others(package):
    arrows = rooms_of(package)
    reach = {room: reached(arrows, room) for room in arrows}
    circles = [
        reason
        for room, targets in arrows.items()
        for target, reason in targets.items()
        if room in reach.get(target, ())
    ]
    assert not circles


@pytest.mark.parametrize("package", LAYERS)
def test_rooms_import_those_above_them_on_the_architecture_page(package):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| (`{package}/\w+`(?:, `\w+`)*) \|", page, re.M)
    order = [name for row in rows for name in re.findall(r"(\w+)`", row)]
    assert set(order) == {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    place = {f"{package}.{name}": number for number, name in enumerate(order)}
    arrows = rooms_of(package)
    against = [
        reason
        for room in place
        for target, reason in arrows.get(room, {}).items()
        if target in place and place[target] > place[room]
    ]
    assert not against
