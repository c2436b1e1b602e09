"""The planner's certificate, apart from its search: bounds against an enumerated F(T), a search that starts badly."""

import itertools
import math

import numpy as np
import pytest

import strategies.dssda.branching as branching
from helpers import oracles
from helpers.instances import random_instance
from strategies.dssda.branching import DeadlineSearch, bound_interval
from strategies.dssda.deadline import Options
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks
from strategies.dssda.segments import segment_tables


class Round:
    """F(T) of a drawn problem by enumeration, and the planner's options of the same problem."""

    def __init__(self, generator):
        self.raw = random_instance(generator, num_devices=int(generator.integers(1, 4)))
        # Weights of one size: then F falls on some intervals and rises on others.
        self.raw["V"] = float(10 ** generator.uniform(-1, 1))
        for cluster in self.raw["clusters"]:
            cluster["wP"] = float(10 ** generator.uniform(0, 2))
            cluster["wS2"] = float(generator.choice([0.0, 3.0]))
        instance = parse_instance(self.raw, "drawn")
        tables = segment_tables(instance)
        uplinks = Uplinks.of(instance)
        self.options = Options.of(instance, [table.offered for table in tables], uplinks)
        self.feasible = plan_round(instance).status != "infeasible"
        sizes = [oracles.best_pipelines(self.raw, n) for n in range(len(self.raw["clusters"]))]
        self._table = {}
        for n, j in itertools.product(range(len(sizes)), range(len(self.raw["clusters"][0]["h"]))):
            upload = oracles.Upload(self.raw, n, j)
            powers = upload.powers(count=200)
            if powers is not None:
                self._table[n, j] = sizes[n], upload.seconds(powers), upload.cost(powers)

    def _cost(self, n, j, deadline):
        """Cheapest S and power of a pair that meet the deadline; inf if none does."""
        cluster, best = self.raw["clusters"][n], math.inf
        if (n, j) in self._table:
            sizes, seconds, costs = self._table[n, j]
            for size, pipeline_s in sizes.items():
                within = costs[self.raw["steps"] * pipeline_s + seconds <= deadline]
                if len(within):
                    best = min(best, cluster["wS"] * size + cluster["wS2"] * size**2 + float(within.min()))
        return best

    def total(self, deadline):
        """F(T), or a little more: of the powers only a grid is tried."""
        clusters = self.raw["clusters"]
        costs = [[self._cost(n, j, deadline) for j in range(len(clusters[0]["h"]))] for n in range(len(clusters))]
        return self.raw["V"] * deadline + oracles.cheapest_matching(costs, [c["skip"] for c in clusters])


@pytest.mark.slow
def test_no_deadline_of_an_interval_costs_less_than_its_bound():
    """The bound once could be replaced by that of the interval's first end without a test that noticed."""
    generator = np.random.default_rng(31)
    at_first, at_last, compared, closest = 0, 0, 0, math.inf
    for _ in range(30):
        drawn = Round(generator)
        if not drawn.feasible:
            continue
        weight, least = drawn.raw["V"], drawn.options.least_deadline()
        for _ in range(3):
            first = least * float(generator.choice([1.0, generator.uniform(1.0, 2.0)]))
            last = first + least * float(10 ** generator.uniform(-2, 0.3))
            within = drawn.options.useful(first, last)
            touch = float(generator.uniform(first, last))
            below = bound_interval(within, weight, first, last, touch)
            grid = np.linspace(first, np.nextafter(last, first), 7)
            values = [drawn.total(deadline) for deadline in grid]
            if below is None:
                assert min(values) == math.inf
                continue
            assert below.bound <= min(values) + 1e-9 * abs(min(values)), (first, last, values)
            at_first += below.at_first
            at_last += not below.at_first
            compared += 1
            closest = min(closest, (min(values) - below.bound) / abs(min(values)))
    assert compared > 40 and at_first > 10 and at_last > 10
    # A bound far below everything would prove nothing.
    assert closest < 1e-6


def contended(seed):
    """More clusters than channels, and powers that cost much: F has several local minima."""
    generator = np.random.default_rng(seed)
    raw = random_instance(generator, num_clusters=8 - 2 * (seed % 2), num_channels=4, num_devices=2, energy="none")
    raw["V"] = float(10 ** generator.uniform(-1, 1))
    for cluster in raw["clusters"]:
        cluster["wP"] = float(10 ** generator.uniform(-1, 3))
        cluster["wS2"] = float(generator.choice([0.0, 10 ** generator.uniform(-1, 1)]))
        cluster["h"] = (10 ** generator.uniform(-1, 1, 4)).tolist()
        cluster["up"].update(Emax=1e3, eps_max=None)
    return parse_instance(raw, "drawn")


@pytest.mark.slow
def test_the_bound_of_a_search_that_finds_nothing_rises_to_the_optimum_and_not_beyond(monkeypatch):
    """Descents nearly always begin with the optimum, and ``lower_bound <= objective`` hides a wrong bound."""

    def poor_start(search, options, deadline):
        """Take the assignment that costs least without any deadline, at twice the time that it needs."""
        if search.taken is None:
            costs = options.costs(np.inf)
            search.taken = options.taken(options.match(costs), costs)
            late = search.taken.pipeline_s + search.taken.uplinks.seconds(search.taken.uplinks.low)
            search.deadline = 2.0 * float(np.max(np.minimum(late, 1e4)))
            search.objective = search._weight * search.deadline + search.taken.total(np.inf)

    searched = 0
    for seed in range(12):
        instance = contended(seed)
        tables = segment_tables(instance)
        usual = plan_round(instance, tables=tables)
        if usual.status == "infeasible":
            continue
        with monkeypatch.context() as patch:
            patch.setattr(DeadlineSearch, "_descend", poor_start)
            found = plan_round(instance, tables=tables)
            patch.setattr(DeadlineSearch, "_improve", lambda *_: False)
            patch.setattr(branching, "INTERVAL_LIMIT", 100)
            bounded = plan_round(instance, tables=tables)
        assert found.status == usual.status == "optimal"
        assert found.objective == pytest.approx(usual.objective, rel=2e-6)
        assert bounded.lower_bound <= usual.objective + 1e-9 * abs(usual.objective), seed
        assert bounded.lower_bound >= usual.objective - 1e-3 * abs(usual.objective), seed
        searched += 1
    assert searched > 6


def test_the_slope_of_an_option_is_the_change_of_its_cost_with_the_deadline():
    hurried, settled = 0, 0
    for seed in range(8):
        instance = contended(seed)
        options = Options.of(instance, [t.offered for t in segment_tables(instance)], Uplinks.of(instance))
        for i in np.flatnonzero(options.settled > options.earliest * (1 + 1e-6)):
            one = options.select(np.array([i]))
            first, width = float(one.earliest[0]), float(one.settled[0] - one.earliest[0])
            for share in (0.3, 0.7, 1.5):
                deadline, step = first + share * width, 1e-5 * width
                change = float(one.costs(deadline + step)[0] - one.costs(deadline - step)[0]) / (2 * step)
                assert float(one.slopes(deadline)[0]) == pytest.approx(change, rel=1e-3, abs=1e-6), (share, seed)
                hurried, settled = hurried + (change < 0), settled + (share > 1)
    assert hurried > 30 and settled > 15
