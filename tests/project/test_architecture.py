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


def test_the_installed_flower_has_all_that_is_used_of_it_beyond_its_public_parts():
    from strategies.flower_internals import missing_internals

    assert not missing_internals()


def test_a_part_of_flower_that_has_moved_is_named_with_what_it_is_needed_for(monkeypatch):
    from strategies import flower_internals

    moved = {"Run": flower_internals.INTERNALS["Run"]._replace(attribute="Gone")}
    monkeypatch.setattr(flower_internals, "INTERNALS", moved)
    (reason,) = flower_internals.missing_internals()
    assert "has no flwr.supercore.run.Gone" in reason and "needs it for: the type of Grid.run" in reason
    with pytest.raises(ImportError, match="install flwr 1.41"):
        from strategies.flower_internals import Run  # noqa: F401


def test_each_part_of_flower_is_noted_where_it_is_imported_for_the_type_checker():
    from strategies.flower_internals import INTERNALS

    tree = ast.parse((ROOT / "strategies" / "flower_internals.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {}
    for node in block.body:
        for alias in node.names:
            if isinstance(node, ast.Import):
                typed[alias.asname] = alias.name
            else:
                typed[alias.asname] = f"{node.module}.{alias.name}"
    noted = {name: ".".join(filter(None, internal[:2])) for name, internal in INTERNALS.items()}
    # What has another name there, modules among it, is of type Any.
    assert typed == {name: place for name, place in noted.items() if place.endswith(f".{name}")}


@pytest.mark.slow
def test_the_door_to_flower_loads_only_what_is_asked_for():
    code = (
        "import sys, strategies.flower_internals as door; assert 'flwr' not in sys.modules; door.log; "
        "print([m for m in sys.modules if m.startswith(('flwr.superlink', 'flwr.supernode', 'flwr.cli.'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_unpickles():
    for package in LAYERS:
        for file in files(package):
            assert not {"pickle", "cloudpickle", "dill"} & set(imported(file)), file
            assert "torch.load(" not in file.read_text(encoding="utf-8"), file


@pytest.mark.slow
def test_importing_the_packages_loads_neither_flower_nor_torch():
    code = (
        "import sys, client_pipeline, strategies, flower_app, client_pipeline.partition.plan, "
        "client_pipeline.system.scenario; print([m for m in ('torch', 'flwr', 'ray') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["flower_app.client_app", "flower_app.launch.session_app"])
def test_flowers_workers_never_import_torch(module):
    """Each is a process: with torch and the planner it took three seconds of processor time and 200 MB more."""
    code = (
        f"import sys, {module}; from client_pipeline.runtime.actors import train_round; "
        "print([m for m in ('torch', 'transformers', 'scipy', 'cvxpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
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
