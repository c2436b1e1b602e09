"""Plans of drawn rounds, with their certificates, are those of earlier releases, for repeated runs.

A change that is meant to change plans, or the effort of a search, and so its bounds, writes the digests anew.
"""

import hashlib
import json

import numpy as np
import pytest

from helpers.instances import random_instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.paper.paper import plan_round_paper
from strategies.dssda.planner import plan_round


def plain(generator):
    return random_instance(generator)


def priced(generator):
    return random_instance(generator) | {"wJ": 0.3, "tail_energy": "none"}


def with_everything(generator):
    """Shares of the passes, overheads, a slow downlink and decoder, and activations that go up."""
    raw = random_instance(generator, num_clusters=2)
    raw["work"] |= {"weight_share": 0.3, "attention_share": 0.2, "t0": 0.1}
    raw["act"] |= {"z_enc_bits": 2e6, "downlink_rate": 2e7, "decoder_s": 0.2, "lat": 0.05}
    for number, cluster in enumerate(raw["clusters"]):
        cluster["devices"][0] |= {"t0": 0.02, "lat": 0.01} if number else {}
    return raw | {"kept_keys_share": 0.1, "gamma_act": raw["gamma0"] / 3}


def large(generator):
    """So many pairs that the channels' prices leave most of them out."""
    return random_instance(generator, num_clusters=24, num_channels=16, num_devices=3, V=1.0)


def divided_for_delay(generator):
    raw = random_instance(generator, num_clusters=2, num_channels=2, num_devices=1, V=0.5)
    raw |= {"L": 2, "m_set": [1, 2], "S_max": None, "energy": "none", "gamma0": 1.0, "S_min": 1}
    raw["band_hz"] = float(generator.uniform(0.6e6, 1.6e6))
    for cluster in raw["clusters"]:
        cluster["up"] |= {"eps_max": None, "Emax": float(generator.uniform(2.0, 8.0))}
        cluster |= dict.fromkeys(("wS", "wS2", "wP", "wE", "wG", "skip"), 0.0)
    return raw


def divided(generator):
    raw = divided_for_delay(generator)
    for cluster in raw["clusters"]:
        cluster |= {"wG": 0.5, "wE": 0.05, "skip": 3.0, **{key: cluster[key][:1] for key in "hIB"}}
    return raw | {"L": 1, "m_set": [1]}


def rounded(value):
    """Six digits of each number: libraries differ in the last ones."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def plan_of(raw, planner):
    answer = planner(parse_instance(raw, "drawn"))
    parts = [part.to_dict() for part in answer.clusters]
    faults = [[fault.constraint, fault.cluster, fault.needs, fault.has] for fault in answer.infeasible]
    return [answer.status, answer.objective, answer.lower_bound, answer.latency_s, parts, faults]


@pytest.mark.parametrize(
    ("kind", "planner", "count", "expected"),
    [
        (plain, plan_round, 40, "5c92ba36467eed70"),
        (priced, plan_round, 20, "c2c0895ec3b4cf2c"),
        (with_everything, plan_round, 20, "ad2a912fec78cb2b"),
        (large, plan_round, 2, "e4c8f2017e866877"),
        (divided_for_delay, plan_round, 4, "4c07e2bcc02606e4"),
        (divided, plan_round, 3, "b3c6bca55d0b5270"),
        (plain, plan_round_paper, 6, "4ce8e8a0ab5d67ae"),
    ],
)
def test_plans_of_drawn_rounds_are_those_of_earlier_releases(kind, planner, count, expected):
    generator = np.random.default_rng(77)
    plans = [plan_of(kind(generator), planner) for _ in range(count)]
    assert any(status != "infeasible" for status, *_ in plans)
    assert hashlib.sha256(json.dumps(rounded(plans)).encode()).hexdigest()[:16] == expected
