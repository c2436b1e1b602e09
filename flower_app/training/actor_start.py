"""How a simulation's actors are arranged, and their start before anybody needs them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from logging import INFO
from typing import Any

from flwr.serverapp import Grid

from client_pipeline.runtime.arrangement import Arrangement
from client_pipeline.runtime.shared_actor import start_when_ray_is_up
from client_pipeline.system.scenario import Scenario
from flower_app.config.run_config import RunConfig
from flower_app.training.network import training_scenario
from flower_app.training.simulated_actors import NEEDED_MODULES, simulated_arrangement
from strategies.flower_internals import InMemoryGrid, log
from strategies.grid.forwarding import innermost

_RAY_S = 120.0
"""How long a simulation's Ray may take to come until actors are left to start when they are needed [s]."""


def arranged(config: RunConfig, scenario: Scenario, grid: Grid, *, quiet: bool = False) -> Arrangement:
    """Decide how many actors a simulation's devices and control units share; real machines have their own.

    Raises
    ------
    ValueError
        As :func:`client_pipeline.runtime.arrangement.arrange`; if micro-batches are to be fused on real machines.
    """
    if not isinstance(innermost(grid), InMemoryGrid):
        if config.runtime.fused_micro_batches > 1:
            raise ValueError(
                f"runtime.fused-micro-batches = {config.runtime.fused_micro_batches}: real machines compute each "
                "micro-batch alone; set runtime.fused-micro-batches to 1"
            )
        return Arrangement()
    arrangement, reason = simulated_arrangement(config, scenario)
    if not quiet:
        log(INFO, reason)
    return arrangement


def start_actors(flat: Mapping[str, Any], grid: Grid) -> None:
    """Begin to start a simulation's shared actors, in a thread: they import for seconds. Says nothing of mistakes.

    Parameters
    ----------
    flat : the run's configuration; nothing of it is imported that the server alone needs, and takes its time
    grid : Flower's
    """
    try:
        config = RunConfig.as_sent(flat)
        network = training_scenario(config)
        arrangement = arranged(config, network.first(config.num_clusters or network.num_clusters), grid, quiet=True)
    except (ValueError, FileNotFoundError):
        return  # the run's preparation meets it again, and says what it is
    if arrangement.actors:
        needs = (arrangement.actors, config.runtime.actor_idle, NEEDED_MODULES, _RAY_S)
        threading.Thread(target=start_when_ray_is_up, args=needs, daemon=True).start()
