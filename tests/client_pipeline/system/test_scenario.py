"""Scenario files: units, draws, and a clear word for every mistake."""

import copy
import tomllib

import pytest

from client_pipeline.system.scenario import load_scenario, parse_scenario
from helpers.mistaken_values import changed
from helpers.repository import ROOT

GOOD = tomllib.loads((ROOT / "configs" / "scenarios" / "default.toml").read_text())


def test_values_are_converted_to_si():
    scenario = load_scenario("default")
    assert scenario.num_clusters == 3
    assert scenario.block_memory == 0.375e9
    # What a file does not say of the decoder and of the downlink costs nothing.
    assert (scenario.costs.decoder_s, scenario.costs.downlink_rate, scenario.costs.upload_activation_bits) == (
        0.0,
        0.0,
        0.0,
    )
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
        (("device", "memory-gb"), [1, 2], "x: device.memory-gb: expected one value for each of 6, found 2"),
        (("device", "frequency-ghz"), {"min": 2, "max": 1}, "x: device.frequency-ghz: min 2 is above max 1"),
        (("device", "frequency-mhz"), 5, "unknown key 'device.frequency-mhz'; did you mean 'frequency-ghz'?"),
        (("cluster",), 3, "x: cluster: expected one or more tables [[cluster]], in double brackets, found 3"),
        (("device", "frequency-ghz"), "0.5 GHz", "x: device.frequency-ghz: expected a number above 0 in the unit"),
        (("device", "kappa"), float("inf"), "x: device.kappa: expected a number above 0"),
        (
            ("device", "flop-per-cycle"),
            None,
            "x: device.flop-per-cycle: missing; expected a number above 0 in the unit",
        ),
        (("device", "speed-factor"), 1.2, "x: device.speed-factor: expected at most 1, found 1.2"),
        (("channels",), 0, "x: channels: expected an integer of at least 1, found 0"),
        (("noise-dbm-per-hz",), "low", "x: noise-dbm-per-hz: expected a number in the unit"),
        (("link",), {"gain": -30}, "unknown key 'link.gain'; did you mean 'gain-db'?"),
        (("link",), {"bandwidth-mhz": 0}, "x: link.bandwidth-mhz: expected a number above 0"),
        (("uplink",), {"max-power-dbm": 27}, "unknown key 'uplink.max-power-dbm'; did you mean 'max-power-w'?"),
        (("uplink",), {"mean-energy-j": [1, 2, 3]}, "x: uplink.mean-energy-j: expected one number, found [1, 2, 3]"),
        (("channel",), {"fading-floor": 2}, "x: channel.fading-floor: expected at most 1, found 2"),
        (("channel",), {"interference-w": [0.1]}, "x: channel.interference-w: expected a number or a range"),
        (("channel",), 5, "x: expected a table [channel], found 5"),
        (("block", "upload-mbit"), -1, "x: block.upload-mbit: expected a number of at least 0"),
        (
            ("block", "backward-per"),
            "batch",
            "x: block.backward-per: expected one of microbatch, sample, found 'batch'",
        ),
        (("planner",), {"blocks": 0}, "x: planner.blocks: expected an integer of at least 1, found 0"),
        (("planner",), {"v": float("nan")}, "x: planner.v: expected a number of at least 0"),
        (("planner",), {"gama-max": 3}, "unknown key 'planner.gama-max'; did you mean 'gamma-max'?"),
        (("block",), None, "missing table"),
        (("clusters",), None, "x: clusters: missing; expected an integer of at least 1"),
        (("device", "memory-gb"), [1, 2, 3, -4, 5, 6], "x: device.memory-gb[3]: expected a number above 0"),
        (("device", "frequency-ghz"), {"min": 0, "max": 1}, "x: device.frequency-ghz.min: expected a number above 0"),
        (("device", "frequency-ghz"), 1e300, "x: device.frequency-ghz: expected a value that can be held in SI units"),
        (("link",), {"gain-db": 4000}, "x: link.gain-db: expected a value that can be held in SI units, found 4000"),
        (("link",), {"gain-db": -4000}, "x: link.gain-db: expected a value that can be held in SI units, found -4000"),
        (("channel",), {"gain-db": 4000}, "x: channel.gain-db: expected a gain that can be held as a plain factor"),
        (("channel",), {"distance-m": 1e300, "path-loss-exponent": 3}, "x: channel.gain-db: expected a gain"),
        (("noise-dbm-per-hz",), 1e9, "x: noise-dbm-per-hz: expected a value that can be held in SI units"),
        (("channel",), {"interference-w": 0}, "x: channel.interference-w: expected above 0, found 0: Eq. (25)"),
    ],
)
def test_mistakes_name_file_and_key(path, value, message):
    with pytest.raises(ValueError) as error:
        parse_scenario(changed(GOOD, path, value), "x")
    assert message in str(error.value)


def test_an_unknown_scenario_lists_the_packaged_ones():
    with pytest.raises(
        FileNotFoundError,
        match="no packaged scenario 'nowhere'; expected one of city, default, edge-boxes,",
    ):
        load_scenario("nowhere")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_scenario("nowhere.toml")


def test_natural_units_become_si():
    scenario = load_scenario("table2")
    device, uplink = scenario.clusters[0][0], scenario.uplinks[0]
    assert device.link_gain == pytest.approx(1e-3)
    assert device.link_bandwidth_hz == 0.5e6
    assert 0.07 <= device.link_power_w <= 0.1
    assert 0.4e6 <= uplink.bandwidth_hz <= 0.6e6
    assert uplink.mean_energy_j is None
    assert scenario.noise_psd == pytest.approx(10**-17.4 * 1e-3)
    assert scenario.costs.upload_time_bits == scenario.costs.upload_energy_bits == 19e6
    assert scenario.costs.o_f == 2e9
    assert scenario.planner.gamma_max == 2.6


def test_keys_that_are_absent_have_the_values_of_table2():
    short, full = load_scenario("default"), load_scenario("table2")
    assert (short.uplinks, short.channels, short.costs) == (full.uplinks, full.channels, full.costs)
    assert (short.clusters, short.noise_psd) == (full.clusters, full.noise_psd)
    raw = {key: value for key, value in GOOD.items() if key != "planner"}
    assert parse_scenario(raw, "x").planner == full.planner


def test_the_contended_network_has_more_clusters_than_channels_and_the_same_first_ones():
    contended, full = load_scenario("table2-contended"), load_scenario("table2")
    assert (contended.num_clusters, contended.num_channels) == (8, 4)
    assert contended.clusters[:3] == full.clusters
    assert contended.channels.large_scale_gain[:3] == full.channels.large_scale_gain


def test_a_file_that_is_not_toml_is_named(tmp_path):
    for content in (b"format = ", b"\xff\xfe"):
        (tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.toml: expected TOML"):
            load_scenario(str(tmp_path / "broken.toml"))


def test_without_interference_the_distortion_needs_the_sinr():
    raw = copy.deepcopy(GOOD)
    raw["channel"], raw["planner"] = {"interference-w": 0}, {"distortion": "sinr"}
    assert parse_scenario(raw, "x").channels.interference_w == (0.0, 0.0)


def test_path_loss_falls_with_the_distance():
    raw = copy.deepcopy(GOOD)
    raw["channel"] = {"gain-db": -30, "distance-m": [10, 100, 1000], "path-loss-exponent": 3}
    gains = [g[0] for g in parse_scenario(raw, "x").channels.large_scale_gain]
    assert gains == pytest.approx([1e-6, 1e-9, 1e-12])


def test_one_gain_more_than_a_million_is_refused():
    raw = GOOD | {"clusters": 101, "channels": 9901}
    message = "x: channels: expected at most 1,000,000 for all clusters together, found 1,000,001"
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_scenario(raw, "x")


@pytest.mark.parametrize(
    ("path", "last", "next_one", "message"),
    [
        (("seed",), 2**63 - 1, 2**63, "x: seed: expected at most 9,223,372,036,854,775,807, found"),
        (("devices",), {"min": 3, "max": 3}, {"min": 3, "max": 10_001}, "x: devices.max: expected at most 10,000"),
        (("device", "memory-gb"), {"min": 2, "max": 2}, {"min": 2.1, "max": 2}, "min 2.1 is above max 2"),
        (("device", "speed-factor"), 1.0, 1.001, "x: device.speed-factor: expected at most 1"),
        (("channel",), {"fading-floor": 1.0}, {"fading-floor": 1.001}, "x: channel.fading-floor: expected at most 1"),
        (("channel",), {"shadowing-db": 0}, {"shadowing-db": -0.1}, "expected a number of at least 0"),
        (("block", "weight-gradient-share"), 1.0, 1.001, "weight-gradient-share: expected a share from 0 to 1"),
        (("block", "kept-keys-share"), 1.0, 1.001, "kept-keys-share: expected a share from 0 to 1"),
        (("block", "activation-memory-gb"), 0.374, 0.375, "expected a part of block.memory-gb, 0.375, found 0.375"),
        (("block", "upload-mbit"), 0.0, -1e-9, "x: block.upload-mbit: expected a number of at least 0"),
        (("planner",), {"batch-size": 10**6}, {"batch-size": 10**6 + 1}, "expected at most 1,000,000, found 1000001"),
        (("planner",), {"local-steps": 10**6}, {"local-steps": 10**6 + 1}, "expected at most 1,000,000, found 1000001"),
        (("planner",), {"blocks": 10_000}, {"blocks": 10_001}, "x: planner.blocks: expected at most 10,000"),
        (("planner",), {"max-micro-batches": 10_000}, {"max-micro-batches": 10_001}, "expected at most 10,000"),
    ],
)
def test_the_last_value_of_a_range_is_taken_and_the_next_refused(path, last, next_one, message):
    assert parse_scenario(changed(GOOD, path, last), "x").num_clusters == 3
    with pytest.raises(ValueError, match=message):
        parse_scenario(changed(GOOD, path, next_one), "x")


def test_costs_of_a_file_are_its_own_in_si():
    block = {
        "forward-gflop": 2.0,
        "backward-gflop": 3.0,
        "backward-per": "sample",
        "overhead-s": 0.5,
        "activations-mbit": 4.0,
        "gradient-mbit": 5.0,
        "activations-per": "sample",
        "link-latency-s": 0.25,
        "upload-mbit": 6.0,
        "upload-energy-mbit": 7.0,
        "upload-activations-mbit": 8.0,
        "downlink-mbit-per-s": 9.0,
        "decoder-s": 0.75,
        "memory-gb": 1.5,
        "weight-gradient-share": 0.5,
        "attention-share": 0.125,
        "activation-memory-gb": 1.0,
        "kept-keys-share": 0.0625,
    }
    costs = parse_scenario(GOOD | {"block": block}, "x").costs
    assert (costs.o_f, costs.o_b, costs.o_b_scaling, costs.t0) == (2e9, 3e9, "sample", 0.5)
    assert (costs.z_bits, costs.g_bits, costs.act_scaling, costs.lat) == (4e6, 5e6, "sample", 0.25)
    assert (costs.upload_time_bits, costs.upload_energy_bits, costs.upload_activation_bits) == (6e6, 7e6, 8e6)
    assert (costs.downlink_rate, costs.decoder_s, costs.block_memory) == (9e6, 0.75, 1.5e9)
    assert (costs.weight_share, costs.attention_share, costs.kept_keys_share) == (0.5, 0.125, 0.0625)
    assert (costs.activation_memory, costs.device_memory, costs.memory) == (1e9, 0.0, None)


@pytest.mark.parametrize(("planner", "most"), [({"batch-size": 8}, 8), ({"max-micro-batches": 4}, 4), ({}, 64)])
def test_a_batch_has_no_more_micro_batches_than_examples(planner, most):
    assert parse_scenario(GOOD | {"planner": planner}, "x").planner.max_micro_batches == most
