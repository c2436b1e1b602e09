"""Imports run one way, and heavy libraries stay behind their doors."""

import ast
import re
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


# Rooms: a package's folders, and each of its modules that lies in no folder.

KNOWN_CIRCLES = {"strategies": {"strategies.aggregation", "strategies.decoder", "strategies.grid"}}
"""Rooms that still import each other round in a circle; to be emptied, never to be extended."""


def rooms_of(package):
    """Each room of a package with those that it imports, and the line of source that says so."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files(package)}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}

    def room(module):
        return ".".join(module.split(".")[:2])

    arrows = {}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imports = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imports = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                assert not isinstance(node, ast.ImportFrom), f"{file}: a relative import hides where it leads"
                continue
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
    known = KNOWN_CIRCLES.get(package, set())
    circles = [
        reason
        for room, targets in arrows.items()
        for target, reason in targets.items()
        if room in reach.get(target, ()) and not {room, target} <= known
    ]
    assert not circles


def test_the_rooms_of_the_pipeline_import_those_above_them_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = re.findall(r"^\| `client_pipeline/(\w+)` \|", page, re.M)
    assert order == ["partition", "link", "system", "runtime"]
    place = {f"client_pipeline.{name}": number for number, name in enumerate(order)}
    arrows = rooms_of("client_pipeline")
    against = [
        reason
        for room in place
        for target, reason in arrows.get(room, {}).items()
        if target in place and place[target] > place[room]
    ]
    assert not against
