"""The Hungarian method against all permutations."""

import numpy as np
import pytest

from helpers import oracles
from strategies.dssda.matching import match_channels


@pytest.mark.parametrize(("num_clusters", "num_channels"), [(1, 1), (1, 4), (4, 1), (3, 3), (2, 4), (5, 2), (4, 3)])
def test_the_matching_costs_as_little_as_the_best_permutation(num_clusters, num_channels):
    generator = np.random.default_rng(10 * num_clusters + num_channels)
    impossible = 0
    for _ in range(60):
        costs = generator.normal(0.0, 5.0, (num_clusters, num_channels))
        costs[generator.random(costs.shape) < generator.choice([0.0, 0.3, 0.7])] = np.inf
        skip = generator.normal(0.0, generator.choice([0.0, 3.0, 1e4]), num_clusters)
        best = oracles.cheapest_matching(costs.tolist(), skip.tolist())
        found = match_channels(costs, skip)
        if found is None:
            assert best == np.inf
            impossible += 1
            continue
        assert found.cost == pytest.approx(best, rel=1e-12)
        channels = [j for j in found.channel_of if j is not None]
        assert len(channels) == len(set(channels)) == min(num_clusters, num_channels)
        paid = [skip[n] if j is None else costs[n, j] for n, j in enumerate(found.channel_of)]
        assert sum(paid) == pytest.approx(best, rel=1e-12)
    assert 0 < impossible < 60


def test_a_cluster_without_any_channel_takes_a_virtual_one_when_there_are_more_clusters_than_channels():
    costs = np.array([[np.inf], [7.0]])
    # Cluster 0 would rather not be skipped, but cannot be matched.
    assert match_channels(costs, np.array([1e6, 0.0])) == ((None, 0), 1e6 + 7.0)


def test_skip_has_no_say_when_every_cluster_has_a_channel():
    costs = np.array([[1.0, 2.0], [1.0, 5.0]])
    assert match_channels(costs, np.array([-1e9, -1e9])) == ((1, 0), 3.0)


def test_channels_are_filled_even_if_skipping_all_would_be_cheaper():
    matching = match_channels(np.array([[3.0], [4.0]]), np.array([-10.0, -10.0]))
    assert matching == ((0, None), -7.0)


def test_a_huge_skip_does_not_drown_the_costs_in_rounding():
    # Once costs less skip were matched: cluster 0 then got either channel.
    costs = np.array([[2e-4, 1e-4], [5.0, 5.0], [0.0, 0.0]])
    assert match_channels(costs, np.array([1e15, 0.0, 1.0])) == ((1, None, 0), 1e-4)
