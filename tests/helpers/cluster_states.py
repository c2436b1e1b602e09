"""States that the clusters of the default scenario report, and networks of many clusters."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from client_pipeline.system.scenario import load_scenario
from helpers.repository import ROOT
from strategies.clusters import ClusterState


def states():
    scenario = load_scenario("default")
    return [
        ClusterState(cluster=n, node_id=100 + n, devices=devices, block_memory=scenario.block_memory, num_examples=0)
        for n, devices in enumerate(scenario.clusters)
    ]


@cache
def many_clusters(num_clusters, **settings):
    """A network of so many clusters, each of which has a channel, with other settings of the planner."""
    text = (ROOT / "configs" / "scenarios" / "table2.toml").read_text()
    for key, number in (("clusters", 3), ("channels", 4)):
        text = text.replace(f"{key} = {number}", f"{key} = {num_clusters}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.toml"
        path.write_text(text)
        scenario = load_scenario(str(path))
    return replace(scenario, planner=replace(scenario.planner, **settings))
