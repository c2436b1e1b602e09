"""Bounds of a divided band against an enumeration finer than their grid: none is above what can be had."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.instances import random_instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.least_band import _Need, delay_alone
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import segment_tables
from strategies.dssda.split_band import _PriceSearch, plan_split_band


def drawn(seed, *, delay):
    """Two clusters of one device each that divide a band."""
    generator = np.random.default_rng(seed)
    raw = random_instance(generator, num_clusters=2, num_channels=2, num_devices=1, V=0.5)
    raw |= {"L": 2, "m_set": [1, 2], "S_min": 1, "S_max": None, "energy": "none", "gamma0": 0.1e9}
    raw["band_hz"] = float(generator.uniform(0.6e6, 1.6e6))
    for cluster in raw["clusters"]:
        cluster["up"] |= {"eps_max": None, "Emax": float(generator.uniform(4.0, 8.0))}
        cluster |= {"wP": float(10 ** generator.uniform(0, 2)), "wG": float(generator.choice([0.0, 5.0]))}
        if delay:
            cluster |= dict.fromkeys(("wS", "wS2", "wP", "wE", "wG", "skip"), 0.0)
    return parse_instance(raw, "drawn")


def with_parts(instance, share):
    bands = share * instance.band_hz, (1 - share) * instance.band_hz
    clusters = (replace(c, B=(b,) * len(c.B)) for c, b in zip(instance.clusters, bands, strict=True))
    return replace(instance, band_hz=None, clusters=tuple(clusters))


def least_objective(instance, tables):
    """Least over divisions of the band, each planned exactly: a grid, and a finer one around its best."""

    def costs(shares):
        answers = [plan_round(with_parts(instance, float(share)), tables=tables) for share in shares]
        return [np.inf if answer.objective is None else answer.objective for answer in answers]

    shares = np.linspace(0.02, 0.98, 15)
    values = costs(shares)
    middle, step = shares[int(np.argmin(values))], shares[1] - shares[0]
    finer = np.linspace(max(middle - step, 1e-3), min(middle + step, 1 - 1e-3), 11)
    return min(values + costs(finer))


@pytest.mark.parametrize("seed", range(3))
def test_no_division_of_a_band_costs_less_than_its_bound_at_any_price(seed):
    instance = drawn(70 + seed, delay=False)
    assert not delay_alone(instance)
    tables = segment_tables(instance)
    least, band = least_objective(instance, tables), instance.band_hz
    search = _PriceSearch(instance, [table.offered for table in tables])
    coarse = np.tile(np.geomspace(1e-3, 1.0, 25) * band, (2, 1))
    bounds = [search.bound(coarse, price * instance.V / band) for price in (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)]
    # A bound far below everything would prove nothing.
    assert 0.7 * least <= max(bounds) <= least * (1 + 1e-7)


@pytest.mark.parametrize("seed", range(2))
def test_the_price_of_a_band_is_that_at_which_the_clusters_want_what_there_is(seed):
    instance = drawn(90 + seed, delay=False)
    tables, band = segment_tables(instance), instance.band_hz
    search = _PriceSearch(instance, [table.offered for table in tables])
    grid = np.tile(np.geomspace(1e-2, 1.0, 40) * band, (2, 1))
    price, wanted = search.price(grid, 0.0)
    below, above = wanted[0].sum(), wanted[-1].sum()
    # Neighbours of a grid are 12 % apart: at a price between two demands either may be had.
    assert price > 0 and above <= band <= below and below - above <= 0.15 * band
    again, wanted = search.price(grid, 40 * price)
    assert 0.8 < again / price < 1.25 and wanted[-1].sum() <= band <= wanted[0].sum()


@pytest.mark.parametrize("seed", range(3))
def test_no_division_of_a_band_ends_a_round_sooner_than_the_bound_of_delay(seed):
    """The plan that goes with it is a dear one: an objective next to the optimum would hide a bound beyond it."""
    instance = drawn(80 + seed, delay=True)
    assert delay_alone(instance)
    tables = segment_tables(instance)

    def plan(part, matched):
        answer = plan_round(part, tables=tables)
        return replace(answer, objective=3 * answer.objective)

    answer = plan_split_band(instance, [table.offered for table in tables], plan, 1e-6)
    least = least_objective(instance, tables)
    assert answer.status == "feasible" and 0.99 * least <= answer.lower_bound <= least * (1 + 1e-7)


def test_bands_are_tried_close_to_those_so_far_and_far_from_them():
    instance = drawn(71, delay=False)
    answer, band = plan_round(with_parts(instance, 0.5)), instance.band_hz
    around = np.array([0.3, 0.7]) * band
    for row, middle in zip(_PriceSearch(instance, []).grid(answer, around, 1.7), around, strict=True):
        assert np.all(np.diff(row) >= 0) and middle in row
        assert 1e-6 * band <= row[0] < middle / 10 and row[-1] == band
        at = int(np.searchsorted(row, middle))
        assert row[at + 1] == pytest.approx(middle * 1.0003) and row[at - 1] == pytest.approx(middle / 1.0003)
        below, above = middle / row[:at][::-1] - 1, row[at + 1 :][row[at + 1 :] < band] / middle - 1
        assert np.diff(np.log(above)) == pytest.approx(np.log(1.7))
        assert np.diff(np.log(below[below < 30])) == pytest.approx(np.log(1.7))


def test_the_least_band_that_is_tried_is_a_millionth_of_all_and_the_largest_is_all():
    """A bound holds for the bands between the ends of the grid: it must reach the whole band from the least one."""
    instance = drawn(71, delay=False)
    answer, band = plan_round(with_parts(instance, 0.5)), instance.band_hz
    narrow, wide = _PriceSearch(instance, []).grid(answer, np.array([2e-6, 1 - 2e-6]) * band, 1.25)
    assert narrow[0] == pytest.approx(1e-6 * band) and narrow[-1] == wide[-1] == band
    assert np.diff(np.log(narrow)).max() < 0.3


def test_a_cluster_whose_steps_end_at_the_deadline_can_upload_in_no_band():
    instance = drawn(80, delay=True)
    # One bit, which takes next to no band in a second.
    clusters = [replace(c, up=replace(c.up, e_bits=1.0, t_bits=1.0)) for c in instance.clusters]
    instance = replace(instance, clusters=tuple(clusters))
    offered = [list(table.offered)[:1] for table in segment_tables(instance)]
    need = _Need(instance, offered, instance.band_hz)
    ends = [instance.steps * choices[0].pipeline_s for choices in offered]
    for n, end in enumerate(ends):
        assert np.isinf(need._hertz(end)[n]).all() and np.isfinite(need._hertz(end + 1.0)[n]).all()
