"""Node configuration of a SuperNode, as Flower reads it."""

import pytest

from client_pipeline.system.scenario import load_scenario
from flower_app.client_app import node_folder
from flower_app.config.run_config import RunConfig
from flower_app.node.config import NodeConfig
from flower_app.runs.run_directory import plain_name
from helpers.repository import ROOT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "partition-id: expected the cluster's index from 0, found None"),
        ({"partition-id": "0"}, "partition-id: expected the cluster's index from 0, found '0'"),
        ({"partition-id": -1}, "partition-id: expected the cluster's index from 0, found -1"),
        ({"partition-id": 0, "data_path": "/x"}, "unknown key 'data_path'; expected partition-id, data-path"),
        ({"partition-id": 0, "ray-address": "a:1"}, "ray-address and host: expected both or none"),
    ],
)
def test_what_makes_no_node_is_refused(given, message):
    with pytest.raises(ValueError, match="node config: ") as error:
        NodeConfig.read(given)
    assert message in str(error.value)


def test_a_nodes_own_text_takes_the_place_of_the_runs():
    files = dict.fromkeys(["data.train-source", "data.train-target", "data.test-source", "data.test-target"], "text")
    config = RunConfig.from_flat({"data.source": "files", "data.path": "/server", "data.partition": "nodes"} | files)
    assert NodeConfig(cluster=0, data_path="/own").run_config(config).data.path == "/own"
    assert NodeConfig(cluster=0, simulated=True).run_config(config) == config
    with pytest.raises(ValueError, match=r"cluster 0: data-path: expected the folder of its text .* --data FOLDER"):
        NodeConfig(cluster=0).run_config(config)
    assert NodeConfig(cluster=0).run_config(RunConfig()) == RunConfig()


def test_a_device_profile_takes_the_place_of_the_scenarios_devices(tmp_path):
    declared = load_scenario("default").clusters[0]
    assert NodeConfig(cluster=0).devices(declared) == declared
    profile = tmp_path / "devices.toml"
    profile.write_text(
        'format = "collapipe-scenario/1"\nclusters = 1\ndevices = 2\n'
        "[device]\nflop-per-cycle = [8.0, 4.0]\nfrequency-ghz = 1.0\nmemory-gb = 2.0\n[block]\nmemory-gb = 0.5\n"
    )
    own = NodeConfig(cluster=5, device_profile=str(profile)).devices(declared)
    assert [device.speed for device in own] == [8e9, 4e9] and len(declared) == 6
    with pytest.raises(FileNotFoundError, match="device-profile: no file /none.toml; write one with collapipe profile"):
        NodeConfig(cluster=0, device_profile="/none.toml").devices(declared)


def test_a_profile_of_a_whole_network_gives_each_cluster_its_own(tmp_path):
    network = str(ROOT / "configs" / "scenarios" / "unequal.toml")
    clusters = load_scenario("unequal").clusters
    for n in range(2):
        assert NodeConfig(cluster=n, device_profile=network).devices(clusters[1 - n]) == clusters[n]
    with pytest.raises(
        ValueError, match=r"device-profile: .*unequal.toml has the clusters 0 to 1, expected cluster 2; "
    ):
        NodeConfig(cluster=2, device_profile=network).devices(clusters[0])


def test_a_node_on_another_machine_keeps_its_files_below_its_own_folder(tmp_path):
    config = RunConfig(run_dir=str(tmp_path / "runs" / "x"))
    simulated = NodeConfig(cluster=2, simulated=True)
    assert node_folder(config, simulated, "x") == tmp_path / "runs" / "x" / "clusters" / "cluster-2"
    elsewhere = NodeConfig(cluster=2, state_dir=str(tmp_path / "state"))
    assert node_folder(config, elsewhere, "x") == tmp_path / "state" / "x" / "cluster-2"
    # Once, a run of a directory with a space or an umlaut was refused when all of it had started.
    for name in ("größe", "my run", ".hidden", "-", "x" * 250, "\udcff"):
        folder = node_folder(config, elsewhere, plain_name(tmp_path / name))
        assert folder.parent.parent == tmp_path / "state"
    for name in ("../x", "", ".", "a/b"):
        with pytest.raises(ValueError, match="expected a run's plain name"):
            node_folder(config, elsewhere, name)
