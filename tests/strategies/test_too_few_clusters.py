"""Strategies that can make nothing of a run's clusters are refused before anything is trained."""

import json
from dataclasses import replace

import pytest

from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner


def planned(strategy, num_clusters, **options):
    """Choose a strategy as the set-up of a run with so many clusters does."""
    scenario = load_scenario("table2")
    scenario = replace(scenario, clusters=(scenario.clusters * num_clusters)[:num_clusters])
    config = RunConfig.from_flat({"strategy": strategy, "strategy-options": json.dumps(options)})
    return make_planner(config, scenario)


@pytest.mark.parametrize(
    ("strategy", "options", "fewest"),
    [
        ("Bulyan", {}, 3),
        ("Bulyan", {"num_malicious_nodes": 1}, 7),
        ("flwr.serverapp.strategy:Bulyan", {}, 3),
        ("Krum", {}, 3),
        ("Krum", {"num_malicious_nodes": 1}, 5),
        ("MultiKrum", {"num_nodes_to_select": 4}, 4),
        ("MultiKrum", {"num_nodes_to_select": 5, "num_malicious_nodes": 1}, 6),
        ("FedTrimmedAvg", {}, 5),
        ("FedTrimmedAvg", {"beta": 0.4}, 3),
    ],
)
def test_a_strategy_with_too_few_clusters_is_refused_at_set_up(strategy, options, fewest):
    assert planned(strategy, fewest, **options) is None
    for num_clusters in {2, fewest - 1}:
        message = rf"strategy: {strategy.rpartition(':')[2]}.* needs {fewest} clusters in a round, found {num_clusters}"
        with pytest.raises(ValueError, match=message):
            planned(strategy, num_clusters, **options)


def test_clusters_that_a_round_leaves_out_do_not_count():
    with pytest.raises(ValueError, match="Krum .* needs 3 clusters in a round, found 2"):
        planned("Krum", 4, fraction_train=0.5, min_train_nodes=1)


@pytest.mark.parametrize("key", ["min_train_nodes", "min_available_nodes"])
@pytest.mark.parametrize("strategy", ["FedAvg", "FedProx", "FedAdam"])
def test_a_strategy_that_would_wait_for_more_clusters_than_there_are_is_refused(strategy, key):
    with pytest.raises(ValueError, match=f"strategy-options: {strategy}: {key}: expected at most 2 clusters, found 3"):
        planned(strategy, 2, **{key: 3})


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_a_share_of_clusters_that_trains_nobody_is_refused(fraction):
    with pytest.raises(ValueError, match=f"strategy-options: FedAvg: fraction_train: .* found {fraction}"):
        planned("FedAvg", 2, fraction_train=fraction)


@pytest.mark.parametrize("prefix", ["", "flwr.serverapp.strategy:"])
@pytest.mark.parametrize("name", ["FedXgbBagging", "FedXgbCyclic"])
def test_strategies_of_trees_are_refused_by_name(prefix, name):
    with pytest.raises(ValueError, match=f"strategy: {prefix}{name} joins trees of XGBoost"):
        planned(prefix + name, 3)
