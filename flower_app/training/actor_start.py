"""How a simulation's actors are arranged, and their start before anybody needs them."""

from __future__ import annotations

import threading
from logging import INFO

from flwr.serverapp import Grid

from client_pipeline.partition.families import dropouts
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.arrangement import Arrangement, arrange
from client_pipeline.runtime.shared_actor import start_when_ray_is_up
from client_pipeline.system.scenario import Scenario
from flower_app.config.run_config import RunConfig
from flower_app.training.network import training_scenario
from strategies.flower_internals import InMemoryGrid, log
from strategies.grid.forwarding import innermost

_RAY_S = 120.0
"""How long a simulation's Ray may take to come until actors are left to start when they are needed [s]."""
_NEEDED_MODULES = ("client_pipeline.runtime.control_unit", "flower_app.training.cluster_data")
"""What a shared actor imports while the server loads data and model."""


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
    arrangement, reason = arrange(
        config.runtime,
        config.faults,
        paced=config.device_emulation == "paced",
        num_devices=[len(devices) for devices in scenario.clusters],
    )
    if not quiet:
        log(INFO, reason)
    return arrangement


def check_fusion(config: RunConfig, spec: ModelSpec) -> None:
    """Refuse fused micro-batches of a model with dropout: its masks are drawn for each micro-batch.

    Raises
    ------
    ValueError
        Naming the model's settings.
    """
    if config.runtime.fused_micro_batches > 1 and (rates := dropouts(spec)):
        found = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
        raise ValueError(
            f"runtime.fused-micro-batches = {config.runtime.fused_micro_batches}: expected a model without dropout, "
            f"found {found}; set runtime.fused-micro-batches to 1, or dropout to 0"
        )


def start_actors(config: RunConfig, grid: Grid) -> None:
    """Begin to start a simulation's shared actors, in a thread: they import for seconds. Says nothing of mistakes."""
    try:
        network = training_scenario(config)
        arrangement = arranged(config, network.first(config.num_clusters or network.num_clusters), grid, quiet=True)
    except (ValueError, FileNotFoundError):
        return  # the run's preparation meets it again, and says what it is
    if arrangement.actors:
        needs = (arrangement.actors, config.runtime.actor_idle, _NEEDED_MODULES, _RAY_S)
        threading.Thread(target=start_when_ray_is_up, args=needs, daemon=True).start()
