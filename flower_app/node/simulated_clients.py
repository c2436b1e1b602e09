"""In a simulation, as many clients at once as it has workers for."""

# Alone: it changes Flower's own module, and says why.

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from strategies.flower_internals import INTERNALS

_MOST_CLIENTS = 10_000
"""Threads are started as they are needed."""


def let_all_clients_run() -> None:
    """Give Flower's simulation a thread for each of its workers; nothing happens in a process that is none.

    Clusters that train in the same round wait for each other at the decoder. Flower's simulation hands messages to its
    workers from a pool of threads, of which there are as many as cores and four more, at most 32: of more clusters some
    would begin only when the others had waited for them in vain.

    Flower loads the client app in the simulation's own process, before it makes the pool.
    """
    internal = INTERNALS["SimulationThreads"]
    assert internal.attribute is not None
    if (engine := sys.modules.get(internal.module)) is not None:
        setattr(engine, internal.attribute, partial(ThreadPoolExecutor, _MOST_CLIENTS))
