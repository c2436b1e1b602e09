"""The segment scheduler against all compositions."""

import math

import numpy as np
import pytest

from helpers.instances import random_instance
from helpers.oracles import best_pipelines, pipeline_time
from strategies.dssda.closed_form_segments import _Search
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.limits import Limits
from strategies.dssda.segments import segment_table, segment_tables, solve_segments

NUM_INSTANCES = 400


@pytest.fixture(scope="module")
def solved():
    generator = np.random.default_rng(0)
    cases = []
    for _ in range(NUM_INSTANCES):
        raw = random_instance(generator, num_clusters=1)
        cases.append((raw, best_pipelines(raw, 0), segment_table(parse_instance(raw, "case"), 0)))
    return cases


@pytest.mark.slow
def test_every_size_has_the_least_pipeline_time_of_all_compositions(solved):
    for raw, expected, table in solved:
        assert set(table.choices) <= set(expected)
        for size, choice in table.choices.items():
            assert choice.num_segments == size
            assert choice.pipeline_s == pytest.approx(expected[size], rel=1e-9), raw
            own = pipeline_time(raw, 0, choice.delta, choice.m, choice.last)
            assert own == pytest.approx(choice.pipeline_s, rel=1e-12), "breaks a cap, or counts its time differently"


def test_a_size_is_left_out_only_where_fewer_segments_are_as_fast(solved):
    for _, expected, table in solved:
        for size in set(expected) - set(table.choices):
            assert min(expected[s] for s in expected if s < size) <= expected[size] * (1 + 1e-9)


def test_a_cluster_without_any_choice_is_infeasible_and_says_why(solved):
    infeasible = [(expected, table) for _, expected, table in solved if not expected]
    assert 20 < len(infeasible) < NUM_INSTANCES / 2, "the instances should cover both"
    for _, table in infeasible:
        assert not table.choices
        assert table.infeasible is not None
        assert table.infeasible.constraint in ("C2", "C7", "C9")
        assert table.infeasible.needs > table.infeasible.has
    assert all(table.infeasible is None for _, expected, table in solved if expected)


@pytest.mark.slow
def test_the_segments_problem_has_the_least_cost_of_all_sizes():
    generator = np.random.default_rng(1)
    for _ in range(100):
        raw = random_instance(generator)
        answer = solve_segments(parse_instance(raw, "case"))
        expected = []
        for n, cluster in enumerate(raw["clusters"]):
            costs = [
                raw["V"] * raw["steps"] * seconds + cluster["wS"] * size + cluster["wS2"] * size**2
                for size, seconds in best_pipelines(raw, n).items()
            ]
            expected.append(min(costs, default=math.inf))
        if math.inf in expected:
            assert answer.status == "infeasible"
            without = {n for n, c in enumerate(expected) if c == math.inf}
            assert {i.cluster for i in answer.infeasible} == without
            assert [c.selected for c in answer.clusters] == [n not in without for n in range(len(expected))]
        else:
            assert answer.status == "optimal"
            assert [c.cost for c in answer.clusters] == pytest.approx(expected, rel=1e-9)
            assert answer.objective == pytest.approx(sum(expected), rel=1e-9)


def test_sizes_that_cost_less_than_smaller_ones_stay():
    generator = np.random.default_rng(2)
    kept = 0
    for _ in range(40):
        raw = random_instance(generator, num_clusters=1, num_devices=4, L=6, S_min=1, S_max=None, energy="none")
        raw["clusters"][0]["wS"] = -5.0
        raw["clusters"][0]["wS2"] = 0.0
        expected = best_pipelines(raw, 0)
        table = segment_table(parse_instance(raw, "case"), 0)
        assert set(table.choices) == set(expected)
        kept += len(expected)
    assert kept > 60


def test_clusters_are_solved_together_as_apart():
    generator = np.random.default_rng(3)
    for _ in range(20):
        instance = parse_instance(random_instance(generator, num_clusters=3), "case")
        together = segment_tables(instance)
        for n, table in enumerate(together):
            assert table == segment_table(instance, n)


@pytest.mark.parametrize("latency", ["eq15", "flowshop"])
def test_one_device_holds_all(latency):
    raw = random_instance(np.random.default_rng(4), num_clusters=1, num_devices=1, L=3, latency=latency, energy="none")
    raw.update(S_min=1, S_max=None, gamma0=0.0)
    table = segment_table(parse_instance(raw, "case"), 0)
    assert table.choices[1].delta == (3,)
    assert table.choices[1].last == (0 if latency == "flowshop" else None)


def test_memory_that_is_met_with_equality_is_enough():
    raw = random_instance(np.random.default_rng(5), num_clusters=1, num_devices=3, L=6, energy="none")
    raw.update(S_min=1, S_max=None, gamma0=0.1e9)
    for device in raw["clusters"][0]["devices"]:
        device["mem"] = 0.2e9
    assert segment_table(parse_instance(raw, "case"), 0).choices[3].delta == (2, 2, 2)


def test_a_size_that_is_as_fast_as_a_smaller_one_and_costs_no_less_is_left_out():
    raw = random_instance(np.random.default_rng(2), num_clusters=1, num_devices=2, latency="eq15", tail="none")
    raw |= {"L": 2, "S_min": 1, "S_max": None, "energy": "none", "m_set": [1], "b": 8}
    raw["work"]["t0"] = 0.0
    raw["act"] |= {"z_bits": 0.0, "g_bits": 0.0, "lat": 0.0}
    cluster = raw["clusters"][0]
    cluster |= {"wS": 0.0, "wS2": 0.0, "devices": [cluster["devices"][0] | {"mem": 1e12}] * 2}
    expected = best_pipelines(raw, 0)
    assert expected[1] == expected[2]
    assert list(segment_table(parse_instance(raw, "equal"), 0).choices) == [1]
    cluster["wS"] = -1.0
    assert list(segment_table(parse_instance(raw, "cheaper"), 0).choices) == [1, 2]


def test_of_devices_without_links_the_bound_of_every_m_and_size_is_its_time():
    """A bound that is too low changes no plan, but has the search try every m."""
    raw = random_instance(np.random.default_rng(2), num_clusters=1, num_devices=3, latency="eq15", tail="none")
    raw |= {"L": 6, "S_min": 1, "S_max": None, "energy": "none", "m_set": [1, 2, 4], "b": 8}
    raw["act"] |= {"z_bits": 0.0, "g_bits": 0.0, "lat": 0.0}
    device = raw["clusters"][0]["devices"][0] | {"mem": 1e12}
    raw["clusters"][0]["devices"] = [device] * 3
    instance = parse_instance(raw, "alike")
    bounds = _Search(instance, [Limits.of(instance, 0)])._bounds()
    for size, row in zip((1, 2, 3), bounds, strict=True):
        delta = [6 // size] * size + [0] * (3 - size)
        times = [pipeline_time(raw, 0, delta, m, None) for m in instance.m_set]
        assert row.tolist() == pytest.approx(times, rel=1e-6)
