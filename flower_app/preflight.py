"""What can be checked of a run before anything is started. The server checks again: it also runs without us."""

from __future__ import annotations

from client_pipeline.system.scenario import Scenario, load_scenario
from flower_app.config import RunConfig
from flower_app.tasks.corpus import load_pairs
from strategies.clusters import ClusterState
from strategies.policies import RoundProblem, make_policy
from strategies.stock import make_stock


def check_run(config: RunConfig) -> int:
    """Check scenario, plan, strategy and data files.

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
    policy = make_policy(config.policy, config.plan)
    if not config.model.pretrained:
        # A pretrained model brings its own number of TEBs.
        policy.plan(_first_round(config, scenario, num_clusters))
    if config.data.source == "files":
        for cluster in range(num_clusters) if config.data.partition == "files" else [None]:
            load_pairs(config.data, "train", config.seed, cluster)
        for split in ("validation", "test"):
            load_pairs(config.data, split, config.seed)
    return num_clusters


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
