"""Flower's simulation runs as many clients at once as the run asks for, on any number of cores."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from flwr.server.superlink.fleet.vce import vce_api
from flwr.simulation.ray_transport import ray_actor

from flower_app.node.simulated_clients import let_all_clients_run

MORE_THAN_FLOWERS = 40


@pytest.fixture
def engine(monkeypatch):
    """Flower's own, as it is before the client app is loaded."""
    monkeypatch.setattr(vce_api, "ThreadPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(ray_actor.BasicActorPool, "add_actors_to_pool", ray_actor.BasicActorPool.add_actors_to_pool)
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
