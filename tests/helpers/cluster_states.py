"""What the clusters of the default scenario report of themselves."""

from client_pipeline.system.scenario import load_scenario
from strategies.clusters import ClusterState


def states():
    scenario = load_scenario("default")
    return [
        ClusterState(cluster=n, node_id=100 + n, devices=devices, block_memory=scenario.block_memory, num_examples=0)
        for n, devices in enumerate(scenario.clusters)
    ]
