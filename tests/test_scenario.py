"""Scenario files: units, draws, and a clear word for every mistake."""

import copy
import tomllib
from pathlib import Path

import pytest

from client_pipeline.system.scenario import load_scenario, parse_scenario

ROOT = Path(__file__).parents[1]
GOOD = tomllib.loads((ROOT / "configs" / "scenarios" / "default.toml").read_text())


def test_values_are_converted_to_si():
    scenario = load_scenario("default")
    assert scenario.num_clusters == 3
    assert scenario.block_memory == 0.375e9
    for cluster in scenario.clusters:
        assert len(cluster) == 6
        for device in cluster:
            assert 0.1e9 <= device.frequency <= 0.8e9
            assert 10 <= device.flop_per_cycle <= 24
            assert device.memory == 1.5e9
            assert device.speed == device.flop_per_cycle * device.frequency


def test_devices_are_unequal_and_the_same_on_every_load():
    first, second = load_scenario("default"), load_scenario("default")
    assert first == second
    assert len({device.speed for cluster in first.clusters for device in cluster}) == 18


def test_a_cluster_keeps_its_devices_when_the_number_of_clusters_changes():
    assert load_scenario("two-clusters").clusters == load_scenario("default").clusters[:2]


def test_a_list_gives_each_device_its_own_value():
    raw = copy.deepcopy(GOOD)
    raw["device"]["memory-gb"] = [1, 2, 3, 4, 5, 6]
    assert [d.memory for d in parse_scenario(raw, "x").clusters[0]] == [1e9, 2e9, 3e9, 4e9, 5e9, 6e9]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other/1", "x: format: expected 'collapipe-scenario/1', found 'other/1'"),
        (("clusters",), 0, "x: clusters: expected an integer of at least 1, found 0"),
        (("devices",), 2.5, "x: devices: expected an integer of at least 1, found 2.5"),
        (("seed",), -1, "x: seed: expected an integer of at least 0, found -1"),
        (("device", "memory-gb"), -1.5, "x: device.memory-gb: expected a number above 0"),
        (("device", "memory-gb"), float("nan"), "x: device.memory-gb: expected a number above 0"),
        (("device", "memory-gb"), [1, 2], "x: device.memory-gb: expected one value for each of 6 devices, found 2"),
        (("device", "frequency-ghz"), {"min": 2, "max": 1}, "x: device.frequency-ghz: min 2 is above max 1"),
        (("device", "frequency-mhz"), 5, "unknown key 'device.frequency-mhz'; did you mean 'frequency-ghz'?"),
        (("cluster",), 3, "unknown key 'cluster'; did you mean 'clusters'?"),
        (("block",), None, "missing table"),
    ],
)
def test_mistakes_name_file_and_key(path, value, message):
    raw = copy.deepcopy(GOOD)
    target = raw
    for key in path[:-1]:
        target = target[key]
    if value is None:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    with pytest.raises(ValueError) as error:
        parse_scenario(raw, "x")
    assert message in str(error.value)


def test_an_unknown_scenario_lists_the_packaged_ones():
    with pytest.raises(
        FileNotFoundError, match="no packaged scenario 'nowhere'; expected one of default, two-clusters"
    ):
        load_scenario("nowhere")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_scenario("nowhere.toml")
