"""Flower's simulation runs as many clients at once as the run asks for, on any number of cores."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation.ray_transport import ray_actor
from ray._private.node import Node

from client_pipeline.runtime.private_ray import ADDRESS_FILE, RAY_FOLDER
from flower_app.node import simulated_clients
from flower_app.node.simulated_clients import let_all_clients_run
from helpers.repository import ROOT

MORE_THAN_FLOWERS = 40


@pytest.fixture
def engine(monkeypatch):
    """Flower's own, as it is before the client app is loaded."""
    monkeypatch.setattr(vce_api, "ThreadPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(ray_actor.BasicActorPool, "add_actors_to_pool", ray_actor.BasicActorPool.add_actors_to_pool)
    monkeypatch.setattr(RayBackend, "init_ray", RayBackend.init_ray)
    return vce_api


def test_clients_that_wait_for_each_other_all_run(engine):
    let_all_clients_run()
    all_there = threading.Barrier(MORE_THAN_FLOWERS)
    # As the engine makes it.
    with engine.ThreadPoolExecutor() as executor:
        waits = [executor.submit(all_there.wait, 30.0) for _ in range(MORE_THAN_FLOWERS)]
    assert sorted(wait.result() for wait in waits) == list(range(MORE_THAN_FLOWERS))


def test_the_client_app_does_it_where_the_engine_is(engine, monkeypatch):
    monkeypatch.delitem(sys.modules, "flower_app.client_app", raising=False)
    import flower_app.client_app  # noqa: F401

    with engine.ThreadPoolExecutor() as executor:
        assert executor._max_workers > MORE_THAN_FLOWERS


def test_a_process_without_the_engine_loads_none(monkeypatch):
    monkeypatch.delitem(sys.modules, vce_api.__name__)
    let_all_clients_run()
    assert vce_api.__name__ not in sys.modules


@pytest.fixture
def pool(engine, monkeypatch):
    """Flower's pool, filled as a simulation fills it, and the actors that it made with their options."""
    let_all_clients_run()
    made = []

    class Worker:
        @classmethod
        def options(cls, **options):
            def remote(**arguments):
                made.append((cls(), options))
                return made[-1][0]

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr(ray_actor, "pool_size_from_resources", lambda resources: 40)
    flowers = ray_actor.BasicActorPool(Worker, {"num_cpus": 1}, {})
    flowers.add_actors_to_pool(flowers.actors_capacity)
    return flowers, made


def test_a_worker_has_many_clients_at_once(pool):
    flowers, made = pool
    assert [options for _, options in made] == [{"num_cpus": 1, "max_concurrency": n} for n in (16, 16, 8)]
    assert flowers.num_actors == 40 == len(flowers.pool)
    workers = [flowers.submit(lambda worker, *job: worker, (None, None, str(n), None)) for n in range(40)]
    assert not flowers.is_actor_available()
    assert [workers.count(worker) for worker, _ in made] == [16, 16, 8]
    assert flowers.client_resources == {"num_cpus": 1}


@pytest.fixture
def join(engine, monkeypatch):
    """What Flower's backend starts Ray with, and the cluster that the environment names then."""
    calls, original = [], vars(Node)["start_api_server"]

    def init_ray(backend, config):
        calls.append((config, os.environ.get("RAY_ADDRESS")))
        # What it starts has no dashboard's server, and workers that are forks.
        assert vars(Node)["start_api_server"] is not original
        if config.get("fails"):
            raise ConnectionError("no Ray")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(RayBackend, "init_ray", init_ray)
    let_all_clients_run()

    def join(config):
        object.__new__(RayBackend).init_ray(config)
        assert "RAY_ADDRESS" not in os.environ
        assert vars(Node)["start_api_server"] is original
        return calls[-1]

    return join


CONFIG = {"init_args": {"num_cpus": 3, "num_gpus": 0, "logging_level": "ERROR"}, "other": 1}


def test_a_simulation_joins_the_ray_that_is_there_for_it(join, monkeypatch, tmp_path):
    file = tmp_path / "address"
    monkeypatch.setenv(ADDRESS_FILE, str(file))
    threading.Timer(0.1, file.write_text, ["127.0.0.1:6379"]).start()
    # A cluster that is joined has its processors already: Ray refuses to be told again.
    assert join(CONFIG) == ({"init_args": {"logging_level": "ERROR"}, "other": 1}, "127.0.0.1:6379")


@pytest.mark.parametrize(("folder", "joined"), [(str(ROOT), True), ("/another/release", False)])
def test_workers_that_find_this_app_without_being_told_have_no_environment_of_their_own(
    join, monkeypatch, tmp_path, folder, joined
):
    (tmp_path / "address").write_text("127.0.0.1:6379")
    monkeypatch.setenv(ADDRESS_FILE, str(tmp_path / "address"))
    monkeypatch.setenv(RAY_FOLDER, folder)
    calls = []
    monkeypatch.setattr(simulated_clients, "be_driver", lambda address, **options: calls.append((address, options)))
    # Flower's own comes after it, and would start none then.
    assert join(CONFIG) == ({"init_args": {"logging_level": "ERROR"}, "other": 1}, "127.0.0.1:6379")
    expected = ("127.0.0.1:6379", {"include_dashboard": False, "logging_level": "ERROR"})
    assert calls == ([expected] if joined else [])


def test_without_a_launcher_a_simulation_starts_its_own_ray(join, monkeypatch):
    monkeypatch.delenv(ADDRESS_FILE, raising=False)
    assert join(CONFIG) == (CONFIG, None)


def test_a_simulation_starts_its_own_where_the_launchers_did_not_come(join, monkeypatch, tmp_path):
    (tmp_path / "address").write_text("")
    monkeypatch.setenv(ADDRESS_FILE, str(tmp_path / "address"))
    assert join(CONFIG) == (CONFIG, None)
    # Nor does it wait for ever.
    monkeypatch.setattr(simulated_clients, "_RAY_S", 0.1)
    monkeypatch.setenv(ADDRESS_FILE, str(tmp_path / "never"))
    assert join(CONFIG) == (CONFIG, None)


def test_a_ray_that_cannot_be_joined_is_named_to_nobody_afterwards(join, monkeypatch, tmp_path):
    (tmp_path / "address").write_text("127.0.0.1:6379")
    monkeypatch.setenv(ADDRESS_FILE, str(tmp_path / "address"))
    with pytest.raises(ConnectionError):
        join({"fails": True})
    assert "RAY_ADDRESS" not in os.environ
