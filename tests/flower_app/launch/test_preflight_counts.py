"""Clusters that train at once, and so the processes of client apps that a simulation starts."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from flower_app.config.sources import load_config
from flower_app.training.network import clients_at_once, clusters_at_once, pool_size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3),
        ({"scenario": "table2-contended", "num-clusters": 8}, 4),
        ({"scenario": "table2-contended", "num-clusters": 3}, 3),
        ({"scenario": "table2-contended", "num-clusters": 8, "policy": "random+optimal"}, 4),
        # A policy of one's own, a file of plans, and strategies that need no channel may take all.
        ({"scenario": "table2-contended", "num-clusters": 8, "policy": "helpers.outside_policy:InTurn"}, 8),
        ({"scenario": "table2-contended", "num-clusters": 8, "plan": "plans.json"}, 8),
        ({"scenario": "table2-contended", "num-clusters": 8, "strategy": "pipeline"}, 8),
        ({"scenario": "table2-contended", "num-clusters": 8, "strategy": "FedAvg"}, 8),
        ({"scenario": "city", "num-clusters": 100}, 40),
    ],
)
def test_as_many_train_at_once_as_have_a_channel(settings, expected):
    config = load_config(None, [f"{key}={value}" for key, value in ({"num-clusters": 3} | settings).items()])
    assert clusters_at_once(config) == expected
    assert clients_at_once(config) == min(expected, pool_size())


def test_a_simulation_has_as_many_client_apps_as_flowers_pool_has_threads():
    with ThreadPoolExecutor() as executor:
        assert pool_size() == executor._max_workers
