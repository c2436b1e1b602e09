"""The network that a run trains on: a scenario with the run's own model, batch, local steps and overrides."""

from __future__ import annotations

from dataclasses import replace

from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.costs import model_costs
from client_pipeline.system.scenario import Scenario, load_scenario
from flower_app.config.run_config import RunConfig


def training_scenario(config: RunConfig, spec: ModelSpec | None = None) -> Scenario:
    """Load the run's scenario; L, b and the local steps are the run's, a scenario's own serve planning alone.

    Parameters
    ----------
    config : the run's
    spec : its model, where it is known; otherwise L is the configuration's, and ``costs = "model"`` has no effect yet

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the key or file at fault.
    """
    # Where the model is not known yet, torch is not imported yet, either.
    num_blocks = config.model.encoder_layers
    if spec is not None:
        from client_pipeline.partition.families import num_blocks_of

        num_blocks = num_blocks_of(spec)
    scenario = load_scenario(config.scenario, None if config.scenario_seed < 0 else config.scenario_seed)
    if config.num_clusters > scenario.num_clusters:
        raise ValueError(
            f"num-clusters: {config.num_clusters} clusters, but scenario {config.scenario} has "
            f"{scenario.num_clusters}; lower num-clusters or choose another scenario"
        )
    planner, overrides = scenario.planner, config.planner
    # A scenario that allows every m of its own batch allows every m of the run's.
    all_m = planner.max_micro_batches >= planner.batch_size
    settings = replace(
        planner,
        num_blocks=num_blocks,
        batch_size=config.batch_size,
        max_micro_batches=config.batch_size if all_m else min(planner.max_micro_batches, config.batch_size),
        local_steps=config.local_steps,
        gradient_accumulation=config.gradient_accumulation,
        v=overrides.v or planner.v,
        gamma_max=overrides.gamma_max or planner.gamma_max,
        energy_price=overrides.energy_price or planner.energy_price,
        bandwidth=overrides.bandwidth_of(planner.bandwidth),
    )
    costs = scenario.costs
    if not config.traits.decoder_on_server:
        # Where the cluster trains the decoder, no activations go up.
        costs = replace(costs, upload_activation_bits=0.0)
    if config.costs == "model" and spec is not None:
        momentum = config.optimizer.name == "sgd" and config.optimizer.momentum > 0
        costs = model_costs(
            spec,
            sequence_length=overrides.length or config.data.max_length,
            batch_size=config.batch_size,
            local_steps=config.local_steps,
            gradient_accumulation=config.gradient_accumulation,
            optimizer="momentum" if momentum else config.optimizer.name,
            compression=config.compression,
            trains_head=not config.traits.decoder_on_server,
            recompute=config.runtime.recompute,
        )
    return replace(scenario, planner=settings, costs=costs)
