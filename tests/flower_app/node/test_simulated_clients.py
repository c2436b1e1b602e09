"""Flower's simulation runs as many clients at once as the run asks for, on any number of cores."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flwr.server.superlink.fleet.vce import vce_api

from flower_app.node.simulated_clients import let_all_clients_run

MORE_THAN_FLOWERS = 40


@pytest.fixture
def engine(monkeypatch):
    """Flower's own, as it is before the client app is loaded."""
    monkeypatch.setattr(vce_api, "ThreadPoolExecutor", ThreadPoolExecutor)
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
