"""What can be checked of a run before anything is started. The server checks again: it also runs without us."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from client_pipeline.runtime.head import HeadTrainer
from client_pipeline.system.scenario import Scenario, load_scenario
from flower_app.config import RunConfig
from flower_app.tasks.base import task
from strategies.clusters import ClusterState
from strategies.decoder import DecoderTrainer
from strategies.decoder_service import DecoderService
from strategies.policies import RoundProblem, make_policy
from strategies.stock import make_stock


def check_run(config: RunConfig) -> int:
    """Check scenario, strategy, data, model, plan and the decoder's address and certificates.

    Returns
    -------
    Number of clusters of the run.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the key or file, what was found, what was expected.
    """
    scenario = load_scenario(config.scenario)
    num_clusters = config.num_clusters or scenario.num_clusters
    if num_clusters > scenario.num_clusters:
        raise ValueError(
            f"num-clusters: {num_clusters} clusters, but scenario {config.scenario} has {scenario.num_clusters}; "
            "lower num-clusters or choose another scenario"
        )
    if config.strategy != "collapipe":
        make_stock(config.strategy, config.strategy_arguments(), num_clusters)
    elif config.strategy_options:
        raise ValueError("strategy-options: collapipe takes none; leave it empty, its settings have keys of their own")
    policy = make_policy(config.policy, config.plan)
    data = config.data
    if data.source == "generated":
        # Text without end can only be too little for its clusters; so a little of it tells.
        few = min(data.num_examples, num_clusters)
        data = replace(data, num_examples=few, evaluation_examples=1, partition="iid")
    task(config.task).check(data, config.model, config.seed, num_clusters)
    policy.plan(_first_round(config, scenario, num_clusters))
    if config.strategy == "collapipe":
        _try_decoder(config)
    return num_clusters


def _try_decoder(config: RunConfig) -> None:
    """Read the certificates and listen for a moment, with next to nothing for a decoder."""
    trainer = DecoderTrainer(HeadTrainer(nn.Linear(1, 1), config.optimizer, unit=0), config.decoder_sync)
    service = DecoderService(config.decoder, trainer, num_clusters=1)
    try:
        service.start()
    finally:
        service.stop()


def _first_round(config: RunConfig, scenario: Scenario, num_clusters: int) -> RoundProblem:
    clusters = [
        ClusterState(
            cluster=n, node_id=0, devices=scenario.clusters[n], block_memory=scenario.block_memory, num_examples=0
        )
        for n in range(num_clusters)
    ]
    return RoundProblem(
        round=1, num_blocks=config.model.encoder_layers, batch_size=config.batch_size, clusters=clusters
    )
