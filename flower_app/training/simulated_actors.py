"""How large a simulation will be, before there is one: clusters at a time, and the actors that they share."""

from __future__ import annotations

from client_pipeline.partition.spec import OUR_OWN, is_outside
from client_pipeline.runtime.arrangement import Arrangement, arrange
from client_pipeline.system.scenario import Scenario
from flower_app.config.run_config import RunConfig
from flower_app.training.network import training_scenario
from strategies.planning.policy_names import OPTIMAL, POLICIES

NEEDED_MODULES = ("client_pipeline.runtime.control_unit", "flower_app.training.cluster_data")
"""What a shared actor imports while the server loads data and model."""


def simulated_arrangement(config: RunConfig, scenario: Scenario) -> tuple[Arrangement, str]:
    """Decide who shares an actor, and why; raises as :func:`client_pipeline.runtime.arrangement.arrange`.

    Parameters
    ----------
    config : the run's
    scenario : its network
    """
    return arrange(
        config.runtime,
        config.faults,
        paced=config.device_emulation == "paced",
        num_devices=[len(devices) for devices in scenario.clusters],
    )


def clusters_at_once(config: RunConfig) -> int:
    """Most clusters of a complete configuration that train in the same round."""
    if config.traits.channel_for_each and config.policy.removesuffix(OPTIMAL) in POLICIES and not config.plan:
        return min(config.num_clusters, training_scenario(config).num_channels)
    return config.num_clusters


def shared_actors(config: RunConfig) -> list[str]:
    """Names of the shared actors that the simulation of a checked, complete configuration will ask for."""
    arrangement, _ = simulated_arrangement(config, training_scenario(config).first(config.num_clusters))
    return arrangement.actors


def worker_imports(config: RunConfig) -> list[str]:
    """Modules of libraries that the actors of a checked, complete configuration need beside torch."""
    family = config.model.family
    adapters = ["peft"] if config.model.trainable == "lora" else []
    if family in OUR_OWN or is_outside(family):
        return adapters
    name = family.replace("-", "_")
    return [f"transformers.models.{name}.modeling_{name}", *adapters]
