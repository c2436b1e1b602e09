"""Fast parts of the planner at scale, against slow and plain ones: rankings, prices and their bounds."""

import itertools
import math

import numpy as np
import pytest

import strategies.dssda.prices as prices_module
from helpers import oracles
from helpers.instances import random_instance
from strategies.dssda.block_price import StageSums
from strategies.dssda.bottleneck import StageCases
from strategies.dssda.flow_shop import least_sums
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.limits import Limits
from strategies.dssda.matching import match_channels
from strategies.dssda.planner import plan_round
from strategies.dssda.prices import match_at_prices


@pytest.fixture
def every_round_is_large(monkeypatch):
    monkeypatch.setattr(prices_module, "FEW_PAIRS", 0)


def stages(generator, num_devices):
    """Times of a TEB and a link and caps of each device, often equal."""
    teb = generator.choice([1.0, 0.5, generator.uniform(0.2, 2.0)], num_devices)
    link = generator.choice([0.0, 0.5, generator.uniform(0.0, 2.0)], num_devices)
    return teb, link, generator.integers(0, 5, num_devices).astype(float)


def least_by_trial(teb, link, cap, size, num_blocks, member=None):
    """Least T at which S devices, ``member`` among them, hold L TEBs: all sets and all stage times are tried."""
    times = sorted({j * a + t for a, t, c in zip(teb, link, cap, strict=True) for j in range(1, int(c) + 1)})
    for bottleneck in times:
        held = [
            max((j for j in range(int(c) + 1) if j * a + t <= bottleneck * (1 + 1e-12)), default=0)
            for a, t, c in zip(teb, link, cap, strict=True)
        ]
        for crew in itertools.combinations([k for k, count in enumerate(held) if count], size):
            if sum(held[k] for k in crew) >= num_blocks and (member is None or member in crew):
                return bottleneck
    return math.inf


def test_the_least_bottleneck_of_every_size_is_that_of_all_sets_of_devices():
    generator = np.random.default_rng(51)
    finite = 0
    for _ in range(60):
        num_devices = int(generator.integers(1, 6))
        teb, link, cap = stages(generator, num_devices)
        for num_blocks in (1, 4, 7):
            sizes = np.arange(1, min(num_devices, num_blocks) + 1)
            case = StageCases(teb[None], link[None], cap[None], num_blocks)
            found = case.least(np.zeros(len(sizes), dtype=np.intp), sizes)
            expected = [least_by_trial(teb, link, cap, size, num_blocks) for size in sizes]
            assert found == pytest.approx(expected, rel=1e-12), (teb, link, cap, num_blocks)
            finite += sum(map(math.isfinite, expected))
    assert finite > 80


def test_the_least_bottleneck_with_a_given_device_is_that_of_all_sets_that_hold_it():
    generator = np.random.default_rng(52)
    later = 0
    for _ in range(40):
        num_devices = int(generator.integers(1, 6))
        teb, link, cap = stages(generator, num_devices)
        num_blocks = int(generator.integers(1, 8))
        sizes = range(1, min(num_devices, num_blocks) + 1)
        pairs = np.array(list(itertools.product(sizes, range(num_devices))), dtype=np.intp)
        case = StageCases(teb[None], link[None], cap[None], num_blocks).at(np.zeros(len(pairs), dtype=np.intp))
        found = case.least_with(pairs[:, 0], pairs[:, 1])
        expected = [least_by_trial(teb, link, cap, size, num_blocks, member) for size, member in pairs]
        assert found == pytest.approx(expected, rel=1e-12), (teb, link, cap, num_blocks)
        free = case.least(np.arange(len(pairs)), pairs[:, 0])
        assert np.all(free <= found)
        later += int(np.sum(free < found))
        where = np.isfinite(found) & np.isfinite(free)
        members = case.members(np.where(where, free, 1.0), pairs[:, 0])[np.arange(len(pairs)), pairs[:, 1]]
        assert np.array_equal(members[where], found[where] == free[where])
    assert later > 20


def drawn_sums(generator):
    raw = random_instance(generator, num_clusters=1, num_channels=1, latency="flowshop")
    instance = parse_instance(raw, "drawn")
    limits = Limits.of(instance, 0)
    row = generator.integers(0, len(instance.m_set), 6)
    largest = float(np.max(limits.teb_s * instance.L + limits.link_s))
    return StageSums.of(limits, row, largest * generator.uniform(0.0, 1.1, 6), instance.L)


def test_a_price_per_teb_bounds_the_least_sum_of_stages_from_below():
    generator = np.random.default_rng(53)
    possible, impossible, tight = 0, 0, 0
    for _ in range(150):
        sums = drawn_sums(generator)
        most = min(sums.teb_s.shape[1], sums.num_blocks)
        exact, bounds = least_sums(sums, most), sums.bounds(most)
        assert np.array_equal(np.isfinite(exact), np.isfinite(bounds))
        where = np.isfinite(exact)
        assert np.all(bounds[where] <= exact[where] * (1 + 1e-12))
        possible, impossible = possible + int(where.sum()), impossible + int((~where).sum())
        tight += int(np.sum(bounds[where] >= exact[where] * (1 - 1e-9)))
    assert possible > 200 and impossible > 200
    # A bound far below would leave all to the programme.
    assert tight > possible / 2


def tables(generator):
    """Costs and ``skip`` of drawn rounds: ties, impossible pairs, more clusters than channels and fewer."""
    for number in range(300):
        shape = tuple(generator.integers(1, 9, 2))
        costs = generator.uniform(-2.0, 5.0, shape) if number % 2 else generator.integers(0, 3, shape).astype(float)
        costs[generator.random(shape) < (0.0, 0.3, 0.6)[number % 3]] = np.inf
        yield costs, generator.choice([0.0, 1.0, 5.0, -3.0, 100.0, 1e9 if number % 5 == 0 else 2.0], shape[0])


@pytest.mark.usefixtures("every_round_is_large")
def test_a_matching_that_prices_lead_to_costs_as_little_as_the_hungarian_method_s():
    generator = np.random.default_rng(54)
    matched, impossible = 0, 0
    for costs, skip in tables(generator):
        best = match_channels(costs, skip)
        some_prices = generator.normal(0.0, 2.0, min(costs.shape))
        first = match_at_prices(costs, skip, None)
        if best is None:
            assert first is None and match_at_prices(costs, skip, some_prices) is None
            impossible += 1
            continue
        matched += 1
        slack = 1e-9 * max(1.0, abs(best.cost))
        for found in (first, match_at_prices(costs, skip, some_prices), match_at_prices(costs, skip, first.prices)):
            taken = [j for j in found.matching.channel_of if j is not None]
            assert len(set(taken)) == len(taken) == min(costs.shape)
            paid = [skip[n] if j is None else costs[n, j] for n, j in enumerate(found.matching.channel_of)]
            assert sum(paid) == pytest.approx(found.matching.cost, rel=1e-12, abs=1e-12)
            assert found.matching.cost == pytest.approx(best.cost, rel=1e-12, abs=slack)
            # Its prices prove it.
            assert best.cost - slack <= found.bound <= best.cost + slack
    assert matched > 100 and impossible > 15


def contended(generator, num_clusters, num_channels, **overrides):
    """A round in which power, size and skip all cost much."""
    raw = random_instance(generator, num_clusters=num_clusters, num_channels=num_channels, **overrides)
    raw["V"] = float(10 ** generator.uniform(-1, 1))
    for cluster in raw["clusters"]:
        cluster["wP"] = float(10 ** generator.uniform(-1, 2))
        cluster["wE"] = float(generator.choice([0.0, 0.3]))
        cluster["wS2"] = float(generator.choice([0.0, 0.5]))
        cluster["skip"] = float(generator.uniform(0, 20))
    return raw


@pytest.mark.parametrize("latency", ["eq15", "flowshop"])
def test_a_round_with_prices_costs_as_little_as_one_of_an_enumeration(latency, every_round_is_large):
    generator = np.random.default_rng(57)
    compared = 0
    for _ in range(12):
        raw = contended(generator, int(generator.integers(1, 4)), int(generator.integers(1, 4)), latency=latency)
        best, answer = oracles.cheapest_round(raw), plan_round(parse_instance(raw, "drawn"))
        assert (answer.status == "infeasible") == (best is None)
        if best is not None:
            assert answer.objective == pytest.approx(best, rel=1e-6, abs=1e-9)
            assert answer.lower_bound <= best + 1e-9 * abs(best)
            assert answer.status == "optimal"
            compared += 1
    assert compared > 4


@pytest.mark.slow
@pytest.mark.parametrize("latency", ["eq15", "flowshop"])
def test_a_round_of_moderate_size_is_certified(latency):
    generator = np.random.default_rng(60)
    raw = contended(generator, 90, 50, num_devices=6, L=8, S_min=1, S_max=None, energy="c9p", latency=latency)
    for cluster in raw["clusters"]:
        cluster["up"].update(Emax=30.0, eps_max=None)
        for device in cluster["devices"]:
            device["Emax"] *= 4.0
    assert 90 * 50 > prices_module.FEW_PAIRS
    answer = plan_round(parse_instance(raw, "moderate"))
    assert answer.status == "optimal"
    assert answer.gap <= 1e-6
    assert sum(cluster.selected for cluster in answer.clusters) == 50
