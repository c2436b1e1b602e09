"""No library is patched, and private names of Flower and Ray are few, each with what would make it superfluous."""

import ast
from importlib import import_module

import pytest

from client_pipeline.runtime.ray.private_ray import RAY_INTERNALS
from helpers.library_patches import patches
from helpers.repository import ROOT, syntax_tree
from strategies import flower_internals, flower_names

PACKAGES = ["client_pipeline", "strategies", "flower_app"]
MOST_OF_FLOWER, MOST_OF_RAY = 25, 8

_OWN_MODEL = "a parameter or module of a model that this process has built"
_OWN_ENVIRONMENT = "variables of this process's environment, which libraries document"
EXCEPTIONS = {
    ("client_pipeline/weights/hub_ids.py", "os.environ[_OFFLINE]"): _OWN_ENVIRONMENT,
    (
        "client_pipeline/families/causal.py",
        "setattr(body.get_submodule(path), leaf, CarriedValue(value.detach()))",
    ): _OWN_MODEL,
    ("client_pipeline/families/lora.py", "setattr(head, 'tied', {})"): _OWN_MODEL,
    ("client_pipeline/weights/low_bits.py", "setattr(block.get_submodule(path), leaf, small)"): _OWN_MODEL,
    (
        "client_pipeline/weights/on_demand.py",
        "setattr(module, leaf, nn.Parameter(self._weights[name], requires_grad=False))",
    ): _OWN_MODEL,
    ("client_pipeline/weights/on_demand.py", "setattr(module, leaf, empty)"): _OWN_MODEL,
    ("client_pipeline/weights/unfilled.py", "setattr(module.get_submodule(path), leaf, value)"): _OWN_MODEL,
    ("client_pipeline/runtime/ray/private_ray.py", "os.environ.pop(name, None)"): _OWN_ENVIRONMENT,
    ("client_pipeline/runtime/ray/private_ray.py", "os.environ.update(private_environment())"): _OWN_ENVIRONMENT,
    ("client_pipeline/runtime/ray/private_ray.py", "os.environ.setdefault(name, value)"): _OWN_ENVIRONMENT,
    (
        "strategies/aggregation/server_optimizers.py",
        "setattr(strategy, kind, {name: value.numpy() for name, value in values.items()})",
    ): "moments of a strategy that this process has built, which Flower's strategies take no other way",
    ("flower_app/cli/__init__.py", "sys.stdout"): "standard output of a program that was started without one",
    ("flower_app/cli/__init__.py", "sys.stderr"): "standard error of a program that was started without one",
    ("flower_app/deployment/ray_node.py", "os.environ.update(environment)"): _OWN_ENVIRONMENT,
    ("flower_app/deployment/ray_node.py", "os.environ.clear()"): _OWN_ENVIRONMENT,
    ("flower_app/deployment/ray_node.py", "os.environ.update(previous_environment)"): _OWN_ENVIRONMENT,
}
"""What a file changes -> why it is no part of a library."""

PRIVATE_RAY = sorted({".".join(name.split(".")[:2]) for name in RAY_INTERNALS if name.startswith("ray.")})


def files():
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def test_no_library_is_patched():
    changes = {
        (file.relative_to(ROOT).as_posix(), text): line for file in files() for line, text in patches(syntax_tree(file))
    }
    assert {
        f"{file}:{line}: {text}" for (file, text), line in changes.items() if (file, text) not in EXCEPTIONS
    } == set()
    assert set(EXCEPTIONS) - set(changes) == set(), "these exceptions are no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "import flwr.supercore.run\nflwr.supercore.run.time = None",
        "import flwr.supercore.run as run\nrun.time: object = None",
        "from flwr.app import Array\nArray.inflate = None",
        "from flwr.app import Array\nArray.limit += 1",
        "from flwr.app import Array\ndel Array.inflate",
        "from ray import worker\nfor worker.say in (1, 2): pass",
        "from ray import worker\nwith open('x') as worker.say: pass",
        "from ray import worker\nworker.say, other = 1, 2",
        "from flwr.supercore import utils\nutils.registry['Array'] = None",
        "from flwr.supercore import utils\nutils.registry.update(Array=None)",
        "from flwr.supercore import utils\nregistry = utils.registry\nregistry['Array'] = None",
        "from flwr.supercore import utils\ndel utils.registry['Array']",
        "from flwr.supercore import utils\nutils.__dict__['pull'] = None",
        "from flwr.supercore import utils\nvars(utils).update(pull=None)",
        "from flwr.supercore import utils\nsetattr(utils, 'pull', None)",
        "from flwr.supercore import utils\ntype.__setattr__(utils, 'pull', None)",
        "def patch(module, name):\n    setattr(module, name, None)",
        "from importlib import import_module\nimport_module('flwr.app').Array = None",
        "from importlib import import_module\nmodule = import_module('flwr.app')\nmodule.Array = None",
        "from importlib import import_module\nname = 'x'\ngetattr(import_module(name), name).y = None",
        "import torch\nbackend = torch.backends.cuda\nbackend.limit = 1",
        "def f():\n    from ray import worker\n    def g():\n        worker.say = None",
        "from strategies.flower_internals import ControlHttpClient\nControlHttpClient.close = None",
        "from ray import a, b\nfor module in (a, b):\n    module.say = None",
        "import sys\nsys.modules['ray'] = None",
        "import sys\ndel sys.modules['ray']",
        "import sys\nsys.modules.pop('ray')",
        "from sys import modules\nmodules['ray'] = None",
        "import sys\nsys.modules['ray'].say = None",
        "import os\nos.environ['X'] = '1'",
    ],
)
def test_each_kind_of_patch_is_noticed(source):
    assert len(patches(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nlayer = torch.nn.Linear(2, 2)\nlayer.note = 1",
        "from strategies.records import CONFIG\nCONFIG.x = 1",
        "import torch\nclass A(torch.nn.Module):\n    def __init__(self):\n        self.x = 1\n        self.y[0] = 2",
        "import json\nvalues = json.loads('{}')\nvalues['x'] = 1\nvalues.update(y=2)",
        "class A:\n    def __post_init__(self):\n        object.__setattr__(self, 'x', 1)",
        "from ray import items\nfor item in items:\n    item.x = 1",
    ],
)
def test_changes_of_what_this_process_has_made_are_none(source):
    assert patches(ast.parse(source)) == []


def private_names(root):
    """Private modules and attributes of a library that the packages name, without the door to Flower's."""
    for file in files():
        for node in ast.walk(syntax_tree(file)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [name] if "(" not in (name := ast.unparse(node)) else []
            for name in names:
                parts = name.split(".")
                private = next((i for i, part in enumerate(parts) if part[:1] == "_" and part[:2] != "__"), None)
                if parts[0] == root and private is not None:
                    yield ".".join(parts[: private + 1])


def test_private_modules_of_ray_are_few_and_each_has_its_row():
    assert set(private_names("ray")) == set(PRIVATE_RAY)
    assert len(RAY_INTERNALS) <= MOST_OF_RAY and all("superfluous" in use for use in RAY_INTERNALS.values())


@pytest.mark.parametrize("name", PRIVATE_RAY)
def test_the_installed_ray_has_each_private_module(name):
    import_module(name)


def test_private_names_of_flower_are_few_and_each_has_its_row():
    assert set(private_names("flwr")) == set()
    rows = flower_internals.INTERNALS
    assert len(rows) <= MOST_OF_FLOWER and all(all(row) for row in rows.values())
    sources = "".join(file.read_text(encoding="utf-8") for file in files() if file.name != "flower_internals.py")
    assert [name for name in rows if name not in sources] == []


@pytest.mark.parametrize("name", flower_internals.INTERNALS)
def test_the_installed_flower_has_each_private_name(name):
    assert getattr(flower_internals, name)


def test_the_installed_flowers_grid_has_the_client_that_replies_are_fetched_with():
    assert hasattr(flower_internals.HttpGrid, "_runtime_client")


def test_a_name_that_a_release_has_moved_is_named_with_its_need(monkeypatch):
    moved = flower_internals.INTERNALS["InMemoryGrid"]._replace(module="flwr.superlink.gone")
    monkeypatch.setitem(flower_internals.INTERNALS, "InMemoryGrid", moved)
    (reason,) = flower_internals.missing_internals()
    assert "has no flwr.superlink.gone.InMemoryGrid" in reason and "needs it for: knowing that a run is" in reason
    with pytest.raises(ImportError, match="install a flwr that"):
        from strategies.flower_internals import InMemoryGrid  # noqa: F401


def test_constants_that_stand_for_flowers_are_those_of_the_installed_release():
    constant = import_module("flwr.common.constant")
    privacy = import_module("flwr.supercore.differential_privacy")
    assert constant.SType.NUMPY == flower_names.NUMPY_STYPE
    codes = {name: code for name, code in vars(flower_names).items() if isinstance(code, int)}
    assert len(codes) == 5 and codes == {name: getattr(constant.ErrorCode, name) for name in codes}
    for name in ("KEY_CLIPPING_NORM", "KEY_NORM_BIT"):
        assert getattr(privacy, name) == getattr(flower_names, name)
