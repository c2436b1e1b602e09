"""Clusters that are not alike: ``[[cluster]]`` tables, what overrides what, draws that stay, and every mistake."""

import copy
import tomllib

import numpy as np
import pytest

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario, parse_scenario
from helpers.mistaken_values import changed

TEXT = """
format = "collapipe-scenario/1"
seed = 5

[device]
flop-per-cycle = { min = 10.0, max = 24.0 }
frequency-ghz = 0.5
memory-gb = 1.5

[uplink]
max-power-w = { min = 0.2, max = 0.5 }

[block]
memory-gb = 0.375

[[cluster]]
name = "harbour"
devices = 3
data-share = 2

[cluster.device]
frequency-ghz = [0.8, 0.6, 0.4]
speed-factor = 1.0

[cluster.link]
bandwidth-mhz = 20.0

[[cluster]]
name = "farm"
count = 2
devices = 4

[cluster.device]
memory-gb = { min = 0.5, max = 1.0 }

[cluster.uplink]
bandwidth-mhz = [0.1, 0.2]
mean-energy-j = 0.5

[cluster.channel]
distance-m = 10.0
path-loss-exponent = 2.0
fading-floor = 1.0
"""
GOOD = tomllib.loads(TEXT)


def parsed(**changes):
    return parse_scenario(copy.deepcopy(GOOD) | changes, "x")


def test_each_cluster_has_its_own_number_of_devices_and_values():
    scenario = parsed()
    assert [len(cluster) for cluster in scenario.clusters] == [3, 4, 4]
    assert scenario.names == ("harbour", "farm 1", "farm 2")
    assert scenario.data_shares == (2.0, 1.0, 1.0)
    harbour, *farms = scenario.clusters
    assert [d.frequency for d in harbour] == [0.8e9, 0.6e9, 0.4e9]
    assert {d.memory for d in harbour} == {1.5e9} and {d.link_bandwidth_hz for d in harbour} == {20e6}
    for farm in farms:
        assert {d.frequency for d in farm} == {0.5e9} and {d.link_bandwidth_hz for d in farm} == {0.5e6}
        assert all(0.5e9 <= d.memory <= 1e9 for d in farm)
    assert len({d.memory for farm in farms for d in farm}) == 8
    assert [u.mean_energy_j for u in scenario.uplinks] == [None, 0.5, 0.5]
    assert 0.4e6 <= scenario.uplinks[0].bandwidth_hz <= 0.6e6
    assert [u.bandwidth_hz for u in scenario.uplinks[1:]] == [0.1e6, 0.2e6]
    assert scenario.channels.speed_factor == ((1.0, 1.0), (0.7, 1.0), (0.7, 1.0))
    assert scenario.channels.fading_floor == (0.2, 1.0, 1.0)
    near, far = scenario.channels.large_scale_gain[0], scenario.channels.large_scale_gain[1]
    assert max(far) < 0.011 < 0.9 < min(near)


def test_rounds_draw_what_each_cluster_says():
    scenario = parsed()
    network = NetworkTrace(scenario).round(4)
    assert [len(frequency) for frequency in network.frequency] == [3, 4, 4]
    assert network.frequency[0] == pytest.approx([0.8e9, 0.6e9, 0.4e9])
    assert all(0.35e9 <= f < 0.5e9 for f in network.frequency[1])
    assert network.gain[1:] == pytest.approx(np.array(scenario.channels.large_scale_gain[1:]))
    assert not np.allclose(network.gain[0], scenario.channels.large_scale_gain[0])


def test_tables_of_equal_clusters_draw_what_the_top_keys_draw():
    raw = {key: value for key, value in GOOD.items() if key not in ("cluster", "uplink")}
    short = parse_scenario(raw | {"clusters": 3, "devices": 5}, "x")
    assert parse_scenario(raw | {"cluster": [{"count": 2, "devices": 5}, {"devices": 5}]}, "x") == short
    assert parse_scenario(raw | {"clusters": 3, "devices": 5, "cluster": [{"count": 3}]}, "x") == short


def test_a_cluster_keeps_its_draws_when_others_come_go_or_change():
    whole = parsed()
    other = copy.deepcopy(GOOD["cluster"])
    other[0] |= {"devices": 7, "device": {}, "uplink": {"max-power-w": 0.1}, "channel": {"distance-m": 3.0}}
    changed = parsed(cluster=[*other, {"count": 3, "devices": {"min": 2, "max": 9}}])
    alone = parsed(cluster=GOOD["cluster"][:1])
    for n in (1, 2):
        assert changed.clusters[n] == whole.clusters[n] and changed.uplinks[n] == whole.uplinks[n]
        assert changed.channels.large_scale_gain[n] == whole.channels.large_scale_gain[n]
        for number in (1, 2):
            rounds = [NetworkTrace(scenario).round(number) for scenario in (changed, whole)]
            assert rounds[0].frequency[n].tolist() == rounds[1].frequency[n].tolist()
            assert rounds[0].gain[n].tolist() == rounds[1].gain[n].tolist()
    assert alone.clusters == whole.clusters[:1] and alone.uplinks == whole.uplinks[:1]
    assert whole.first(1) == alone


def test_a_range_of_devices_is_drawn_for_each_cluster():
    raw = {key: value for key, value in GOOD.items() if key != "cluster"}
    sizes = [len(c) for c in parse_scenario(raw | {"clusters": 40, "devices": {"min": 2, "max": 4}}, "x").clusters]
    assert set(sizes) == {2, 3, 4}
    again = parse_scenario(raw | {"cluster": [{"count": 40, "devices": {"min": 2, "max": 4}}]}, "x")
    assert [len(cluster) for cluster in again.clusters] == sizes
    assert [len(c) for c in parse_scenario(raw | {"clusters": 9, "devices": {"min": 3, "max": 3}}, "x").clusters] == [
        3
    ] * 9
    other = parse_scenario(raw | {"clusters": 40, "devices": {"min": 2, "max": 4}, "seed": 6}, "x")
    assert [len(cluster) for cluster in other.clusters] != sizes


def test_lists_of_the_top_tables_are_for_all_clusters():
    raw = copy.deepcopy(GOOD)
    raw["uplink"] = {"bandwidth-mhz": [1.0, 2.0, 3.0]}
    raw["channel"] = {"distance-m": [10.0, 20.0, 30.0]}
    assert [u.bandwidth_hz for u in parse_scenario(raw, "x").uplinks] == [1e6, 0.1e6, 0.2e6]
    raw["uplink"] = {"bandwidth-mhz": [1.0, 2.0]}
    with pytest.raises(
        ValueError, match=r"x: uplink.bandwidth-mhz: expected one value for each of 3 clusters, found 2"
    ):
        parse_scenario(raw, "x")


def test_a_file_may_leave_the_devices_to_its_clusters():
    raw = {key: value for key, value in GOOD.items() if key != "device"}
    full = {"flop-per-cycle": 20.0, "frequency-ghz": 0.5, "memory-gb": [1.0, 2.0]}
    scenario = parse_scenario(raw | {"cluster": [{"devices": 2, "device": full}]}, "x")
    assert [d.memory for d in scenario.clusters[0]] == [1e9, 2e9]


def test_packaged_networks_of_unequal_clusters():
    unequal = load_scenario("unequal")
    assert [len(cluster) for cluster in unequal.clusters] == [3, 4]
    assert unequal.names == ("workshop", "depot")
    assert min(d.speed for d in unequal.clusters[0]) > max(d.speed for d in unequal.clusters[1])
    for name, number, channels in (("city", 100, 40), ("metropolis", 1000, 400)):
        scenario = load_scenario(name)
        sizes = [len(cluster) for cluster in scenario.clusters]
        assert (len(sizes), sum(sizes), scenario.num_channels) == (number, 10 * number, channels)
        assert (min(sizes), max(sizes)) == (6, 14)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("clusters",), 4, "x: clusters: found 4, but the [[cluster]] tables describe 3; remove the key clusters"),
        (("devices",), 3, "x: cluster[1].devices: found 4, but the file's key devices says 3 for every cluster"),
        (("cluster",), 3, "x: cluster: expected one or more tables [[cluster]], in double brackets, found 3"),
        (("cluster",), {"devices": 3}, "x: cluster: expected one or more tables [[cluster]], in double brackets"),
        (("cluster",), [], "x: cluster: expected one or more tables [[cluster]], in double brackets, found []"),
        (("cluster",), [5], "x: expected a table [cluster[0]], found 5"),
        (("clusters",), [{"devices": 3}], "x: clusters: expected an integer of at least 1"),
        (("cluster", 0, "device", "frequency-mhz"), 5, "unknown key 'cluster[0].device.frequency-mhz'; did you mean"),
        (("cluster", 0, "data-shares"), 2, "x: unknown key 'cluster[0].data-shares'; did you mean 'data-share'?"),
        (("cluster", 1, "block"), {}, "x: unknown key 'cluster[1].block'"),
        (
            ("cluster", 0, "device", "frequency-ghz"),
            [1, 2, 3, 4],
            "x: cluster[0].device.frequency-ghz: expected one value for each of 3, found 4 (cluster 0 has 3 devices)",
        ),
        (
            ("device", "memory-gb"),
            [1, 2, 3, 4],
            "x: device.memory-gb: expected one value for each of 3, found 4 (cluster 0 has 3 devices)",
        ),
        (("cluster", 1, "device", "memory-gb"), -1, "x: cluster[1].device.memory-gb: expected a number above 0"),
        (("cluster", 1, "uplink", "bandwidth-mhz"), [1], "x: cluster[1].uplink.bandwidth-mhz: expected one value for"),
        (("cluster", 1, "device"), 7, "x: expected a table [cluster[1].device], found 7"),
        (("cluster", 1, "count"), 0, "x: cluster[1].count: expected an integer of at least 1, found 0"),
        (("cluster", 1, "devices"), None, "x: cluster[1].devices: missing; expected an integer of at least 1"),
        (("cluster", 1, "devices"), {"min": 4, "max": 2}, "x: cluster[1].devices: expected an integer of at least 1"),
        (("cluster", 1, "devices"), {"min": 0, "max": 2}, "x: cluster[1].devices: expected an integer of at least 1"),
        (("cluster", 1, "devices"), {"min": 1.0, "max": 2}, "x: cluster[1].devices: expected an integer of at least 1"),
        (("cluster", 1, "devices"), {"min": 1}, "x: cluster[1].devices: expected an integer of at least 1 or a range"),
        (("cluster", 0, "data-share"), 0, "x: cluster[0].data-share: expected a number above 0"),
        (("cluster", 0, "data-share"), [1, 2], "x: cluster[0].data-share: expected one value for each of 1 clusters"),
        (("cluster", 0, "name"), "", "x: cluster[0].name: expected a text of 1 to 60 printable characters"),
        (("cluster", 0, "name"), "a\nb", "x: cluster[0].name: expected a text of 1 to 60 printable characters"),
        (("cluster", 0, "name"), 7, "x: cluster[0].name: expected a text of 1 to 60 printable characters"),
        (("cluster", 0, "name"), "farm 2", "x: cluster.name: the clusters 0, 2 are all called 'farm 2'"),
        (
            ("cluster", 0, "channel"),
            {"interference-w": 0.1},
            "x: cluster[0].channel.interference-w: a channel's interference is the same for all clusters; expected",
        ),
        (("cluster", 0, "device", "speed-factor"), 1.5, "x: cluster[0].device.speed-factor: expected at most 1, found"),
        (("cluster", 1, "channel", "fading-floor"), 2, "x: cluster[1].channel.fading-floor: expected at most 1"),
        (("cluster", 1, "channel", "gain-db"), 4000, "x: cluster[1].channel.gain-db: expected a gain that can be held"),
        (("device",), None, "x: cluster[0].device.flop-per-cycle: missing; expected a number above 0"),
    ],
)  # fmt: skip
def test_mistakes_name_the_cluster_and_its_key(path, value, message):
    with pytest.raises(ValueError) as error:
        parse_scenario(changed(GOOD, path, value), "x")
    assert message in str(error.value)


def test_tables_called_clusters_are_told_their_name():
    raw = {key: value for key, value in GOOD.items() if key != "cluster"}
    with pytest.raises(ValueError, match=r"x: clusters: expected a number of equal clusters, .* is \[\[cluster\]\]"):
        parse_scenario(raw | {"clusters": [{"devices": 3}]}, "x")


def test_files_without_tables_draw_from_the_streams_that_they_always_had():
    """Past runs can be repeated: each cluster's devices have a stream, all uplinks share one, key after key."""
    raw = {key: value for key, value in GOOD.items() if key != "cluster"} | {"clusters": 4, "devices": 3}
    raw["uplink"] = {"max-power-w": {"min": 0.2, "max": 0.5}, "energy-budget-j": {"min": 5.0, "max": 9.0}}
    raw["channel"] = {"distance-m": {"min": 1.0, "max": 2.0}, "path-loss-exponent": 2.0, "shadowing-db": 1.0}
    scenario = parse_scenario(raw, "x")
    shared = np.random.default_rng([5, 0, 1])
    drawn = [shared.uniform(low, high, 4) for low, high in ((0.4, 0.6), (0.2, 0.5), (5.0, 9.0))]
    assert [u.bandwidth_hz for u in scenario.uplinks] == [1e6 * float(b) for b in drawn[0]]
    assert [u.max_power_w for u in scenario.uplinks] == drawn[1].tolist()
    assert [u.energy_budget_j for u in scenario.uplinks] == drawn[2].tolist()
    distance = np.random.default_rng([5, 0, 2]).uniform(1.0, 2.0, 4)
    for n in range(4):
        of_cluster = np.random.default_rng([5, n])
        assert [d.flop_per_cycle for d in scenario.clusters[n]] == of_cluster.uniform(10.0, 24.0, 3).tolist()
        assert [d.link_power_w for d in scenario.clusters[n]] == of_cluster.uniform(0.07, 0.1, 3).tolist()
        of_gains = np.random.default_rng([5, n, 3])
        gain_db = of_gains.uniform(-0.12, -0.08, 4) - 20 * np.log10(distance[n]) + of_gains.standard_normal()
        assert scenario.channels.large_scale_gain[n] == pytest.approx(10 ** (gain_db / 10), rel=1e-12)
