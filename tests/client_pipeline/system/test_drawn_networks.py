"""Packaged networks as they are drawn: whoever repeats a past run needs the same ones.

The digests are those of the release before TEBs could cost differently.
"""

import hashlib
import json
from dataclasses import asdict

import pytest

from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario


def rounded(value):
    """Nine digits of each number: libraries differ in the last ones. A later release's empty fields do not count."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items() if one != ()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def digest(value):
    return hashlib.sha256(json.dumps(rounded(value), sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "scenario", "third_round"),
    [
        ("table2", "746e8e67a5a1d85e", "1647a677c0e6ef3d"),
        ("table2-contended", "38a8c2e608f86da2", "c1f0605555a1bbc0"),
        ("table2-bert-activations", "b6ca5178d878252f", "1647a677c0e6ef3d"),
        ("physical", "a7b829df8531521a", "921c8ed000a7c1d0"),
        ("two-clusters", "cc8ffd6050cb1b10", "7c6d491dd4f577a9"),
        ("unequal", "7ef09aa1b0a1d82b", "5f8f7e642f1865d9"),
    ],
)
def test_a_packaged_network_is_drawn_as_it_always_was(name, scenario, third_round):
    network = load_scenario(name)
    state = NetworkTrace(network, seed=1).round(3)
    values = [*state.frequency, state.gain, state.interference_w, state.bandwidth_hz]
    described = asdict(network)
    for later in ("bound", "participation_max"):
        del described["planner"][later]
    assert digest(described) == scenario
    assert digest([state.number, *(one.tolist() for one in values)]) == third_round
