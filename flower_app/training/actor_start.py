"""Arrangement of a simulation's actors, and their start before anybody needs them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from logging import INFO
from typing import Any

from flwr.serverapp import Grid

from client_pipeline.runtime.devices.shared_actor import start_when_ray_is_up
from client_pipeline.runtime.ray.arrangement import Arrangement, arrange
from client_pipeline.system.scenario import Scenario
from flower_app.config.run_config import RunConfig
from flower_app.training.network import training_scenario
from strategies.flower_internals import InMemoryGrid
from strategies.flower_names import log
from strategies.grid.forwarding import innermost

NEEDED_MODULES = ("client_pipeline.runtime.control_unit.control_unit", "flower_app.training.cluster_data")
"""Modules that a shared actor imports while the server loads data and model."""
_RAY_S = 120.0
"""Time for a simulation's Ray to start; after that, actors start when they are needed [s]."""


def arranged(config: RunConfig, scenario: Scenario, grid: Grid, *, quiet: bool = False) -> Arrangement:
    """Decide how many actors a simulation's devices and control units share; real machines have their own."""
    if not isinstance(innermost(grid), InMemoryGrid):
        if config.runtime.fused_micro_batches > 1:
            raise ValueError(
                f"runtime.fused-micro-batches = {config.runtime.fused_micro_batches}: real machines compute each "
                "micro-batch alone; set runtime.fused-micro-batches to 1"
            )
        return Arrangement()
    arrangement, reason = arrange(
        config.runtime,
        config.faults,
        paced=config.device_emulation == "paced",
        num_devices=[len(devices) for devices in scenario.clusters],
    )
    if not quiet:
        log(INFO, reason)
    return arrangement


def start_actors(flat: Mapping[str, Any], grid: Grid) -> None:
    """Begin to start a simulation's shared actors, in a thread: they import for seconds.

    The run's preparation reports mistakes of the configuration; this function does not.
    """
    try:
        config = RunConfig.as_sent(flat)
        network = training_scenario(config)
        arrangement = arranged(config, network.first(config.num_clusters or network.num_clusters), grid, quiet=True)
    except (ValueError, FileNotFoundError):
        return
    if arrangement.actors:
        needs = (arrangement.actors, config.runtime.actor_idle, NEEDED_MODULES, _RAY_S)
        threading.Thread(target=start_when_ray_is_up, args=needs, daemon=True).start()
