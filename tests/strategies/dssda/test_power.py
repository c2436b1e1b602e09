"""Transmit power against fine grids, and the facts that the planner builds on."""

from dataclasses import replace
from fractions import Fraction
from math import factorial

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import draw, instance_to_dict
from strategies.dssda.answer import Infeasibility
from strategies.dssda.instance import Instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.power import (
    Uplinks,
    _expm1_over_slope,
    largest_within_budget,
    power_interval,
    uplink_infeasibility,
    uplink_of,
)


def with_up(instance: Instance, **up) -> Instance:
    cluster = instance.clusters[0]
    return replace(instance, clusters=(replace(cluster, up=replace(cluster.up, **up)),))


def test_the_cheapest_power_costs_no_more_than_any_power_of_a_fine_grid():
    generator = np.random.default_rng(1)
    kinds = set()
    for _ in range(150):
        instance = draw(generator)
        weight = float(generator.choice([0.0, 1.0]) * 10 ** generator.uniform(-3, 1))
        raw = instance_to_dict(instance)
        best = oracles.cheapest_upload(raw, 0, 0, weight)
        uplink, interval = uplink_of(instance, 0, 0), power_interval(instance, 0, 0)
        if isinstance(interval, Infeasibility):
            assert best is None and not uplink.feasible
            kinds.add(interval.constraint)
            continue
        found = float(uplink.power(uplink.cheapest(weight)))
        upload = oracles.Upload(raw, 0, 0)
        cost = float((weight * upload.seconds(found) if weight else 0.0) + upload.cost(found))
        assert cost == pytest.approx(best, rel=1e-9, abs=1e-9)
        low, high = interval
        assert low <= found <= high
        kinds.add("low" if found == low else "high" if found == high else "inside")
    assert kinds == {"C8", "eps_max", "low", "high", "inside"}


def test_the_least_efficiency_for_a_time_uploads_in_just_that_time():
    generator = np.random.default_rng(3)
    seen = 0
    for _ in range(60):
        instance = draw(generator, eps_max=None)
        interval = power_interval(instance, 0, 0)
        if isinstance(interval, Infeasibility):
            continue
        upload = oracles.Upload(instance_to_dict(instance), 0, 0)
        shortest, uplink = float(upload.seconds(interval[1])), uplink_of(instance, 0, 0)
        for factor in (1.5, 10.0, 1000.0):
            power = float(uplink.power(uplink.efficiency(np.asarray(factor * shortest))))
            assert float(upload.seconds(power)) == pytest.approx(factor * shortest, rel=1e-10)
        assert uplink.efficiency(np.asarray(0.99 * shortest)) > uplink.high
        assert uplink.efficiency(np.asarray(0.0)) == np.inf
        seen += 1
    assert seen > 20


def test_the_slope_of_the_energy_over_the_efficiency_is_that_of_its_series():
    """(expm1(x) / x)' is the sum of n x^(n-1) / (n+1)!, also where the formula cancels."""
    efficiencies = [0.0, 1e-9, 1e-3, 0.02, 0.0499, 0.0501, 0.3, 1.0, 2.0]
    exact = [float(sum(n * Fraction(x) ** (n - 1) / factorial(n + 1) for n in range(1, 40))) for x in efficiencies]
    np.testing.assert_allclose(_expm1_over_slope(np.array(efficiencies)), exact, rtol=2e-13)
    np.testing.assert_allclose(_expm1_over_slope(np.array(efficiencies[5:])), exact[5:], rtol=2e-13)


@pytest.mark.parametrize("eps_mode", ["paper", "sinr"])
def test_the_cost_is_convex_in_the_upload_time_as_far_as_it_falls(eps_mode):
    # With wE > 0 the cost is neither convex nor concave in the power; the planner's bounds rest on this instead.
    generator = np.random.default_rng(4)
    falling = 0
    for _ in range(80):
        instance = draw(generator, eps_mode=eps_mode, eps_max=None, Emax=1e6)
        uplinks = Uplinks.of(instance)
        upload = oracles.Upload(instance_to_dict(instance), 0, 0)
        first, last = uplinks.seconds(uplinks.high), uplinks.seconds(np.maximum(uplinks.cheapest(), 1e-3))
        if last <= first * 1.01:
            continue
        seconds = np.linspace(float(first[0, 0]), float(last[0, 0]), 3001)
        power = np.expm1(np.log(2) * upload.up["t_bits"] / (upload.bandwidth * seconds)) * upload.noise / upload.gain
        cost = upload.cost(power)
        steps = np.diff(cost)
        rounding = 1e-12 * np.max(np.abs(cost))
        assert np.all(steps <= rounding)
        assert np.all(np.diff(steps) >= -rounding)
        slope = uplinks.slope_in_time(uplinks.efficiency(seconds[1:-1])).ravel()
        assert np.all(slope >= (steps[:-1] - rounding) / np.diff(seconds)[:-1])
        assert np.all(slope <= (steps[1:] + rounding) / np.diff(seconds)[1:])
        falling += 1
    assert falling > 20


def test_the_largest_upload_that_is_told_fits_and_a_larger_one_does_not():
    generator = np.random.default_rng(5)
    seen = 0
    for _ in range(40):
        instance = draw(generator, eps_max=None, Emax=0.05)
        fault = power_interval(instance, 0, 0)
        if not isinstance(fault, Infeasibility):
            continue
        assert (fault.constraint, fault.cluster, fault.has) == ("C8", 0, 0.05)
        assert fault.needs > fault.has
        bits = float(fault.remedy.split("fits: ")[1].split(" bit")[0])
        assert not isinstance(power_interval(with_up(instance, e_bits=bits * 0.999), 0, 0), Infeasibility)
        assert isinstance(power_interval(with_up(instance, e_bits=bits * 1.001), 0, 0), Infeasibility)
        seen += 1
    assert seen > 10


def test_a_distortion_out_of_reach_names_the_power_that_it_takes():
    instance = draw(np.random.default_rng(6), eps_mode="sinr", C=1.0, eps_max=0.01, Pmax=1e-3, Emax=1e9)
    fault = uplink_infeasibility(instance, Uplinks.of(instance), 0)
    assert fault is not None
    assert (fault.constraint, fault.has) == ("eps_max", 0.01)
    power = float(fault.remedy.split("a power of ")[1].split(" W")[0])
    assert isinstance(power_interval(with_up(instance, Pmax=power * 0.999), 0, 0), Infeasibility)
    assert not isinstance(power_interval(with_up(instance, Pmax=power * 1.001), 0, 0), Infeasibility)


def test_a_channel_without_noise_is_refused_by_name():
    instance = draw(np.random.default_rng(8))
    silent = replace(instance, N0=0.0, clusters=(replace(instance.clusters[0], I=(0.0,)),))
    with pytest.raises(ValueError, match=r"clusters\[0\]\.I\[0\].*N0 = 0"):
        Uplinks.of(silent)


def test_of_several_channels_the_nearest_to_enough_is_told():
    """Once the first one would do, and the worst one, too."""
    raw = instance_to_dict(draw(np.random.default_rng(9), eps_max=None, e_bits=1e6, Emax=1e-9))
    cluster = raw["clusters"][0]
    for gains in ([0.5, 2.0, 1.0], [2.0, 0.5, 1.0], [0.5, 1.0, 2.0]):
        cluster.update(h=gains, I=[0.05] * 3, B=[1e6] * 3)
        instance = parse_instance(raw, "three channels")
        fault = uplink_infeasibility(instance, Uplinks.of(instance), 0)
        # The least energy of any upload: bits ln 2 (I + B N0) / (B h).
        assert fault.needs == pytest.approx(1e6 * np.log(2) * (0.05 + 1e6 * instance.N0) / (1e6 * 2.0), rel=1e-9)


def test_of_channels_on_which_the_distortion_is_out_of_reach_the_clearest_is_told():
    raw = instance_to_dict(draw(np.random.default_rng(10), eps_mode="sinr", C=1.0, eps_max=0.01, Emax=1e9, Pmax=1e-3))
    cluster = raw["clusters"][0]
    cluster.update(h=[0.5, 2.0], I=[0.05] * 2, B=[1e6] * 2)
    instance = parse_instance(raw, "two channels")
    fault = uplink_infeasibility(instance, Uplinks.of(instance), 0)
    assert (fault.constraint, fault.has) == ("eps_max", 0.01)
    assert fault.needs == pytest.approx(1 / (1 + 2.0 * 1e-3 / (0.05 + 1e6 * instance.N0)), rel=1e-9)
    # On one that could reach it, only energy is missing: that one is the nearest.
    cluster["h"] = [1e3, 2.0]
    cluster["I"] = [5e-4, 0.05]
    cluster["up"]["Emax"] = 1e-9
    cluster["up"]["e_bits"] = 1e6
    instance = parse_instance(raw, "two channels")
    assert uplink_infeasibility(instance, Uplinks.of(instance), 0).constraint == "C8"


def test_only_without_noise_and_interference_is_a_channel_refused():
    """Zero noise is a network of textbooks: the rate is that of the interference alone."""
    instance = draw(np.random.default_rng(8))
    clusters = (replace(instance.clusters[0], h=(1.0,), I=(0.1,), B=(1e6,)),)
    quiet = Uplinks.of(replace(instance, N0=0.0, clusters=clusters)).select(0, 0)
    assert float(quiet.noise_gain) == 0.1
    clusters = (replace(clusters[0], I=(0.0,)),)
    thermal = Uplinks.of(replace(instance, N0=1e-9, clusters=clusters)).select(0, 0)
    assert float(thermal.noise_gain) == pytest.approx(1e-3)


def test_the_largest_power_of_a_budget_keeps_it_and_the_next_number_does_not():
    generator = np.random.default_rng(11)
    largest, e0 = 10 ** generator.uniform(-3, 1.5, 300), 10 ** generator.uniform(-3, 3, 300)
    budget = e0 * 10 ** generator.uniform(-0.2, 3, 300)
    found = largest_within_budget(largest, e0, budget)

    def energy(x):
        return e0 * np.where(x > 0, np.expm1(x) / np.where(x > 0, x, 1.0), 1.0)

    bound, none = (energy(largest) > budget) & (budget >= e0), budget < e0
    assert bound.sum() > 50 and none.sum() > 10
    assert np.all(energy(found)[bound] <= budget[bound])
    assert np.all(energy(np.nextafter(found, np.inf))[bound] > budget[bound])
    # A budget below the least energy of any upload leaves nothing; one that is large leaves all.
    assert np.all(found[none] <= 0.0)
    free = energy(largest) <= budget
    assert free.any() and np.array_equal(found[free], largest[free])


def test_a_budget_that_the_largest_power_meets_exactly_leaves_all():
    largest = np.array([1e-3, 0.7, 5.0])
    assert np.array_equal(largest_within_budget(largest, np.ones(3), np.expm1(largest) / largest), largest)
