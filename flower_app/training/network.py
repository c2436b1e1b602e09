"""The network that a run trains on: a scenario with the run's own model, batch, local steps and overrides."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

from client_pipeline.counted import counted
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.costs import model_costs
from client_pipeline.system.scenario import Bandwidth, Bound, Scenario, load_scenario
from flower_app.config.run_config import RunConfig
from strategies.planning.policy_names import OPTIMAL, POLICIES

MOST_EXAMPLES = 100_000
"""Largest batch: a planner tries each number of micro-batches up to it."""


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
        from client_pipeline.families.registry import family_named

        num_blocks = family_named(spec.family).num_blocks(spec)
    scenario = load_scenario(config.scenario, None if config.scenario_seed < 0 else config.scenario_seed)
    if config.num_clusters > scenario.num_clusters:
        raise ValueError(
            f"num-clusters: {counted(config.num_clusters, 'cluster')}, but scenario {config.scenario} has "
            f"{scenario.num_clusters}; lower num-clusters or choose another scenario"
        )
    planner, overrides = scenario.planner, config.planner
    # A scenario that allows every m of its own batch allows every m of the run's.
    if config.batch_size > MOST_EXAMPLES:
        raise ValueError(f"batch-size: expected at most {MOST_EXAMPLES:,}, found {config.batch_size}; lower it")
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
        participation_max=overrides.participation_max or planner.participation_max,
        bound=cast(Bound, overrides.bound or planner.bound),
        energy_price=overrides.energy_price or planner.energy_price,
        bandwidth=cast(Bandwidth, overrides.bandwidth) if overrides.bandwidth else planner.bandwidth,
    )
    costs, forward_only = scenario.costs, config.forward_only(num_blocks)
    if forward_only:
        costs = replace(costs, o_b=0.0, g_bits=0.0)
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
            recompute=config.recomputes,
            forward_only=forward_only,
        )
    return replace(scenario, planner=settings, costs=costs)


_MOST_THREADS, _MORE_THAN_CORES = 32, 4


def pool_size() -> int:
    """Return the threads that hand messages to client apps: those of a ``ThreadPoolExecutor()`` of this Python."""
    # Python 3.13 counts the cores that the process may use.
    cores = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return min(_MOST_THREADS, cores + _MORE_THAN_CORES)


def clusters_at_once(config: RunConfig) -> int:
    """Return the most clusters of a complete configuration that train in the same round."""
    if config.traits.channel_for_each and config.policy.removesuffix(OPTIMAL) in POLICIES and not config.plan:
        return min(config.num_clusters, training_scenario(config).num_channels)
    return config.num_clusters


def clients_at_once(config: RunConfig) -> int:
    """Return how many client apps of a complete configuration run at once: one for each cluster, if they fit."""
    return min(clusters_at_once(config), pool_size())
