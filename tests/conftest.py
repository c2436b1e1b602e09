"""Fixtures shared by the tests."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from client_pipeline.runtime.ray.private_ray import prepare_private_ray

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Hundreds of programs import this project: each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Where other programs fill the memory, Ray would end a test's actors.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# Ray reads its settings when it is imported, and many a test imports it.
prepare_private_ray()

# Actors and simulated clients find what a test hands them by the name of its module.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_configure(config):
    """Leave out the deep tests where the command names neither tests nor a mark."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not deep"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark each test as ``fast`` or ``slow``, and as ``deep`` if slow without a promise; sort long files first."""
    for item in items:
        if "local_ray" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)
            # One that hangs ends long before the others have run.
            item.add_marker(pytest.mark.timeout(120))
        elif not item.get_closest_marker("promise"):
            item.add_marker(pytest.mark.deep)
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("whole" not in item.path.parts, item.path not in slow_files))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one process run all deployments, one after the other: each is a dozen programs, whose peers wait for them."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def deploys(file):
        return "helpers.hosts" in Path(config.rootpath, file).read_text("utf-8")

    class OneDeployment(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "deployments" if deploys(file) else file

    return OneDeployment(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fast tests and their fixtures start no program: what they say must not depend on the machine's load."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("fast"):

            def refuse(self, command, *arguments, **options):
                raise AssertionError(f"a fast test starts {command}; mark it as slow")

            patch.setattr(subprocess.Popen, "__init__", refuse)
            # Nobody cuts the power: what reads the files again reads them from memory. Slow tests wait for the disk.
            patch.setattr(os, "fsync", lambda file: None)
        return (yield)


@pytest.fixture(scope="session")
def real_data():
    """Give the path of a file or folder of real text; the test is skipped where it is absent."""
    root = Path(os.environ.get("COLLAPIPE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))

    def path(name):
        if not (root / name).exists():
            pytest.skip(f"no {name} in {root}; set COLLAPIPE_TEST_DATA to the folder that holds it")
        return root / name

    return path


@pytest.fixture(scope="session")
def history_checker():
    """The module of the benchmarks that checks what a run has left behind."""
    path = Path(__file__).parents[1] / "benchmarks" / "history_checker.py"
    spec = importlib.util.spec_from_file_location("history_checker", path)
    module = sys.modules["history_checker"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def local_ray():
    """One Ray of this test run's own, ended with it."""
    import ray

    from client_pipeline.runtime.ray.private_ray import private_ray

    with private_ray(num_cpus=4), pytest.MonkeyPatch.context() as patch:
        # Which worker died, it would say in the middle of whatever test comes next.
        patch.setattr(ray._private.worker, "print_to_stdstream", lambda *data, **options: None)
        yield ray


@pytest.fixture
def end_actors(local_ray):
    """End the named actors that a test leaves."""
    yield
    from helpers.actor_cases import end_named_actors

    end_named_actors(local_ray)


@pytest.fixture
def served(local_ray):
    """Start services over a fresh decoder, and stop them."""
    from helpers.federated_rounds import decoder_services

    with decoder_services() as start:
        yield start


@pytest.fixture(scope="session", autouse=True)
def simulations():
    """End the simulations that tests have started."""
    yield
    from helpers.simulation import end_simulations

    end_simulations()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flower_process(monkeypatch):
    """Messages can only be made in a process that Flower runs."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)
