"""The network's changes from round to round."""

import dataclasses

import numpy as np

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario

SCENARIO = load_scenario("table2-contended")


def test_any_round_can_be_asked_for_without_those_before():
    trace = NetworkTrace(SCENARIO, 5)
    forward = [trace.round(r) for r in (1, 2, 3)]
    again = NetworkTrace(SCENARIO, 5).round(3)
    assert np.array_equal(again.gain, forward[2].gain)
    assert np.array_equal(again.interference_w, forward[2].interference_w)
    assert all(np.array_equal(a, b) for a, b in zip(again.frequency, forward[2].frequency, strict=True))
    assert not np.array_equal(forward[0].gain, forward[1].gain)


def test_seeds_give_different_rounds_of_the_same_devices():
    first, second = NetworkTrace(SCENARIO, 0).round(1), NetworkTrace(SCENARIO, 1).round(1)
    assert not np.array_equal(first.gain, second.gain)
    assert np.array_equal(first.bandwidth_hz, second.bandwidth_hz)


def test_devices_run_at_their_share_of_their_frequency():
    for number in range(1, 20):
        state = NetworkTrace(SCENARIO).round(number)
        for devices, frequency in zip(SCENARIO.clusters, state.frequency, strict=True):
            share = frequency / np.array([d.frequency for d in devices])
            assert np.all((share >= 0.7) & (share <= 1.0))
            assert len(set(share)) == len(devices)


def test_fading_has_mean_one_above_its_floor():
    trace = NetworkTrace(SCENARIO)
    static = np.array(SCENARIO.channels.large_scale_gain)
    fading = np.array([trace.round(r).gain / static for r in range(1, 400)])
    assert fading.min() >= 0.2
    assert abs(fading.mean() - 1.0) < 0.03
    assert abs(fading.std() - 0.8) < 0.05


def test_interference_is_of_the_channel_and_bandwidth_of_the_control_unit():
    state = NetworkTrace(SCENARIO).round(4)
    assert state.interference_w.shape == (8, 4)
    assert np.all(state.interference_w == state.interference_w[0])
    assert len(set(state.interference_w[0])) == 4
    assert np.all((state.interference_w >= 0.06) & (state.interference_w <= 0.08))
    assert np.all(state.bandwidth_hz == state.bandwidth_hz[:, :1])


def test_a_cluster_has_the_same_rounds_whoever_else_there_is():
    few = dataclasses.replace(
        SCENARIO,
        clusters=SCENARIO.clusters[:2],
        uplinks=SCENARIO.uplinks[:2],
        channels=dataclasses.replace(SCENARIO.channels, large_scale_gain=SCENARIO.channels.large_scale_gain[:2]),
    )
    assert np.array_equal(NetworkTrace(few).round(3).gain, NetworkTrace(SCENARIO).round(3).gain[:2])


def test_no_stream_of_a_round_is_one_of_the_scenarios_own(monkeypatch):
    """NumPy pads seeds with zeros: round 1 of cluster 0 once was the draw of the uplinks' bandwidths, [seed, 0, 1]."""
    seen, make = [], np.random.default_rng

    def first_words(seed):
        generator = make(seed)
        seen.append(tuple(make(seed).integers(0, 2**63, 4)))
        return generator

    monkeypatch.setattr(np.random, "default_rng", first_words)
    scenario = load_scenario("physical")
    trace = NetworkTrace(scenario)
    of_scenario = len(seen)
    for number in range(1, 9):
        trace.round(number)
    assert of_scenario > 5 and len(seen) > of_scenario
    assert len(set(seen)) == len(seen)
