"""How many clusters train at once, and so how many of Flower's processes a simulation starts."""

import pytest

from flower_app.config.sources import load_config
from flower_app.training.simulated_actors import clusters_at_once


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
