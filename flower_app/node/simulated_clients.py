"""In a simulation, as many clients at once as the run asks for, few processes for them, and a Ray that is there."""

# Alone: it changes Flower's own modules, and says why.

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from client_pipeline.runtime.private_ray import ADDRESS_FILE, RAY_FOLDER, be_driver, lean_head
from strategies.flower_internals import INTERNALS

_MOST_CLIENTS = 10_000
"""Threads are started as they are needed."""
CLIENTS_OF_A_WORKER = 16
"""A client waits for its control unit nearly all of the time, and hands on weights for the rest."""
_RAY_S = 60.0
"""How long a Ray that somebody starts may take before the simulation starts its own [s]."""


def let_all_clients_run() -> None:
    """Give Flower's simulation a thread for each of its clients, its workers many clients each, and the launcher's Ray.

    Nothing happens in a process that is no simulation. Flower loads the client app in the simulation's own process,
    before it makes the pools.

    Clusters that train in the same round wait for each other at the decoder. Flower's simulation hands messages to its
    workers from a pool of threads, of which there are as many as cores and four more, at most 32: of more clusters some
    would begin only when the others had waited for them in vain. And a worker is a process of 200 MB, whose imports
    take two seconds of a core, for one client at a time; this app's clients keep nothing in their process.
    """
    threads, workers = INTERNALS["SimulationThreads"], INTERNALS["SimulationWorkers"]
    backends = INTERNALS["SimulationBackend"]
    assert threads.attribute is not None and workers.attribute is not None and backends.attribute is not None
    if (engine := sys.modules.get(threads.module)) is not None:
        setattr(engine, threads.attribute, partial(ThreadPoolExecutor, _MOST_CLIENTS))
        getattr(import_module(workers.module), workers.attribute).add_actors_to_pool = _add_shared_workers
        backend = getattr(import_module(backends.module), backends.attribute)
        backend.init_ray = partialmethod(_join_ray, backend.init_ray)


def _add_shared_workers(pool: Any, num_clients: int) -> None:
    """Fill Flower's pool, in which a client's message takes an entry until it is answered.

    Parameters
    ----------
    pool : Flower's ``BasicActorPool``
    num_clients : at once
    """
    for first in range(0, num_clients, CLIENTS_OF_A_WORKER):
        num_here = min(CLIENTS_OF_A_WORKER, num_clients - first)
        # The options that Flower starts its actors with.
        pool.client_resources["max_concurrency"] = num_here
        pool.pool += [pool.create_actor_fn()] * num_here
    del pool.client_resources["max_concurrency"]
    pool.num_actors += num_clients


def _join_ray(backend: Any, start: Callable[[Any, Mapping[str, Any]], None], config: Mapping[str, Any]) -> None:
    """Join the Ray that the launcher has started; start one where there is none, as lean as that one.

    Parameters
    ----------
    backend : Flower's ``RayBackend``
    start : its ``init_ray``
    config : ``init_args`` are those of ``ray.init``
    """
    if address := _launchers_ray():
        os.environ["RAY_ADDRESS"] = address
        # It has its processors; Ray refuses to be told again.
        init_args = {k: v for k, v in config.get("init_args", {}).items() if not k.startswith("num_")}
        config = {**config, "init_args": init_args}
    try:
        if address and os.environ.get(RAY_FOLDER) == str(Path(__file__).resolve().parents[2]):
            # Its workers look for this app where it is. Flower would say it in an environment of theirs, which takes an
            # agent of Ray's to make; it starts no Ray where there is one.
            be_driver(address, **{"include_dashboard": False, **config["init_args"]})
        with lean_head(environments=True):
            start(backend, config)
    finally:
        # A Ray that anybody starts from here is another.
        os.environ.pop("RAY_ADDRESS", None)


def _launchers_ray() -> str:
    """Wait for the address of the launcher's Ray; empty if there is no launcher, or its Ray did not come."""
    file = Path(os.environ.get(ADDRESS_FILE, ""))
    deadline = time.monotonic() + (_RAY_S if file.name else 0.0)
    while time.monotonic() < deadline:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        time.sleep(0.02)
    return ""
