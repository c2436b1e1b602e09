"""What more of a resource is worth: against an enumeration of the round with it."""

import copy
import math

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import random_instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.planner import plan_round
from strategies.dssda.shadow_prices import GB, MHZ, shadow_prices


def changed(raw, resource, n, k):
    """The round with more of a resource, from its JSON values."""
    raw = copy.deepcopy(raw)
    clusters = raw["clusters"]
    if resource == "memory":
        clusters[n]["devices"][k]["mem"] += GB
    elif resource == "link":
        clusters[n]["devices"][k]["B"] += MHZ
    elif resource == "uplink":
        clusters[n]["B"] = [band + MHZ for band in clusters[n]["B"]]
    elif resource == "device":
        devices = clusters[n]["devices"]
        devices.append(dict(sorted(devices, key=lambda d: -d["phi"] * d["f"])[0]))
    elif resource == "replaced":
        fastest = sorted((d for c in clusters for d in c["devices"]), key=lambda d: -d["phi"] * d["f"])[0]
        clusters[n]["devices"][k] |= {name: fastest[name] for name in ("phi", "f", "kappa", "mem", "Emax")}
    else:
        for cluster in clusters:
            for name in "hIB":
                cluster[name].append(sum(cluster[name]) / len(cluster[name]))
    return raw


def without_channel(raw, j):
    raw = copy.deepcopy(raw)
    for cluster in raw["clusters"]:
        for name in "hIB":
            del cluster[name][j]
    return raw


def best_with_as_many_matched(raw, num_matched):
    """Objective of an enumeration; where a channel more would match a cluster more, of all ways to leave one out."""
    channels = len(raw["clusters"][0]["B"])
    if min(len(raw["clusters"]), channels) == num_matched:
        return oracles.cheapest_round(raw)
    found = [oracles.cheapest_round(without_channel(raw, j)) for j in range(channels)]
    return min((value for value in found if value is not None), default=None)


@pytest.mark.slow
def test_prices_are_what_an_enumeration_finds():
    generator, seen, resources = np.random.default_rng(42), 0, set()
    while seen < 200:
        raw = random_instance(generator, num_devices=int(generator.integers(1, 3)), L=int(generator.integers(1, 4)))
        before = oracles.cheapest_round(raw)
        if before is None:
            continue
        instance = parse_instance(raw, "drawn")
        prices = shadow_prices(instance)
        # One resource of each round: an enumeration takes a while.
        price = prices[-1] if seen % 4 == 0 else prices[int(generator.integers(len(prices)))]
        after = best_with_as_many_matched(changed(raw, *price[:3]), instance.num_matched)
        seen += 1
        if after is None:
            assert price.objective == math.inf and price.resource in ("replaced", "uplink")
            continue
        close = 3e-6 * max(abs(before), abs(after)) + 1e-9
        assert price.objective == pytest.approx(after - before, abs=close), price
        assert price.least - close <= after - before <= price.most + close
        assert price.most - price.least <= close
        resources.add((price.resource, after < before - close))
    assert {(name, True) for name in ("memory", "link", "uplink", "channel", "device", "replaced")} <= resources


def test_more_is_never_worse_where_only_the_latency_counts():
    generator, helped = np.random.default_rng(7), 0
    for _ in range(40):
        raw = random_instance(generator, num_devices=3)
        for cluster in raw["clusters"]:
            cluster |= dict.fromkeys(("wS", "wS2", "wP", "wE", "wG", "skip"), 0.0)
            cluster["up"]["eps_max"] = None
        instance = parse_instance(raw, "drawn")
        if plan_round(instance).objective is None:
            continue
        for price in shadow_prices(instance):
            # Eq. (15) subtracts the longest link: one that is not waited for may be too fast.
            subtracts_link = instance.latency == "eq15" and instance.tail == "last" and price.resource == "link"
            if price.resource != "replaced" and not subtracts_link:
                assert price.seconds <= 1e-5 and price.objective <= 1e-6, price
                helped += price.seconds < -1e-3
    assert helped > 20


def test_a_further_channel_matches_no_further_cluster():
    raw = random_instance(np.random.default_rng(3), num_clusters=3, num_channels=2, num_devices=2, L=2)
    for cluster in raw["clusters"]:
        cluster["skip"] = -1e6
        for device in cluster["devices"]:
            device |= {"mem": 4e9, "Emax": 1e6}
    instance = parse_instance(raw, "drawn")
    channel = shadow_prices(instance)[-1]
    assert channel.resource == "channel" and abs(channel.objective) < 1e5
    assert plan_round(parse_instance(changed(raw, "channel", None, None), "drawn")).objective > -1e5


def test_of_a_divided_band_the_whole_is_priced():
    raw = random_instance(np.random.default_rng(11), num_clusters=2, num_channels=2, num_devices=2, L=2)
    raw["band_hz"] = 1e6
    for cluster in raw["clusters"]:
        for device in cluster["devices"]:
            device |= {"mem": 4e9, "Emax": 1e6}
    prices = shadow_prices(parse_instance(raw, "drawn"))
    assert [p.resource for p in prices if p.cluster is None] == ["uplink"]
    more = plan_round(parse_instance(raw | {"band_hz": 2e6}, "drawn"))
    assert prices[-1].objective == more.objective - plan_round(parse_instance(raw, "drawn")).objective < 0


def test_a_round_without_a_plan_has_no_prices():
    raw = random_instance(np.random.default_rng(5), num_devices=1, L=6)
    raw["clusters"][0]["devices"][0]["mem"] = 1.0
    with pytest.raises(ValueError, match="shadow prices: expected a round with a plan, found cluster 0: C7"):
        shadow_prices(parse_instance(raw, "drawn"))
