"""The bound on unequal participation: what a gap is, what it bounds, and what its queue does to who trains."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.scenario import load_scenario
from strategies.dssda.convergence import participation_gap
from strategies.dssda.queues import Queues, participation_weights
from strategies.dssda.round_problem import round_instance
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def test_a_gap_is_what_a_cluster_lacks_of_its_share():
    shares = np.array([1.0, 1.0, 2.0])
    # Two of three train: half of the update each.
    gaps = participation_gap(np.array([True, False, True]), shares)
    assert gaps.tolist() == [1 - 0.5 / 0.25, 1.0, 1 - 0.5 / 0.5]
    assert participation_gap(np.array([False] * 3), shares).tolist() == [1.0] * 3
    assert participation_gap(np.array([True] * 4), np.ones(4)).tolist() == [0.0] * 4


def test_gaps_bound_the_bias_of_the_mean_update():
    """chi^2 <= c^2 (1 - w) / w, reached where one cluster of the least share has all the surplus."""
    generator = np.random.default_rng(1)
    for _ in range(200):
        num_clusters, rounds = int(generator.integers(2, 7)), 50
        shares = generator.dirichlet(np.ones(num_clusters) * 3)
        chance = generator.uniform(0.1, 1.0, num_clusters)
        selected = generator.random((rounds, num_clusters)) < chance
        selected[~selected.any(axis=1), 0] = True
        gaps = np.mean([participation_gap(row, shares) for row in selected], axis=0)
        mean_update = np.mean(selected / selected.sum(axis=1, keepdims=True), axis=0)
        assert np.allclose(mean_update, (1 - gaps) * shares)
        gradients = generator.standard_normal((num_clusters, 5))
        whole = shares @ gradients
        bias = np.sum((mean_update @ gradients - whole) ** 2)
        spread = shares @ np.sum((gradients - whole) ** 2, axis=1)
        chi_squared = np.sum((mean_update - shares) ** 2 / shares)
        least = shares.min()
        assert bias <= chi_squared * spread * (1 + 1e-9)
        assert chi_squared <= gaps.max() ** 2 * (1 - least) / least * (1 + 1e-9)
    worst = np.array([0.1 + 0.2 * 0.9, *[0.9 * 0.8 / 3] * 3])
    shares = np.array([0.1, 0.3, 0.3, 0.3])
    assert np.sum((worst - shares) ** 2 / shares) == pytest.approx(0.2**2 * 0.9 / 0.1)


def test_the_drift_is_that_of_the_gaps():
    """skip is what the sum of Y gap grows by where a cluster is left out: |S| = min(N, J) either way."""
    shares, queues = np.array([1.0, 2.0, 3.0]), Queues(np.array([4.0, 5.0, 6.0]), np.array([0.5, 0.0, 1.0]))
    weights = participation_weights(queues, shares, 2)
    for n in range(3):
        other = [m for m in range(3) if m != n]
        with_n, without = (np.isin(np.arange(3), chosen) for chosen in ([n, other[0]], other))
        grown = queues.virtual[n] * (participation_gap(without, shares) - participation_gap(with_n, shares))[n]
        assert weights.skip[n] == pytest.approx(grown)
    assert not any(column.any() for column in (weights.wS, weights.wS2, weights.wG, weights.wP))
    assert weights.wE.tolist() == [0.5, 0.0, 1.0]


def contended(**planner):
    scenario = load_scenario("table2-contended")
    return replace(scenario, planner=replace(scenario.planner, **planner))


def test_segments_and_powers_cost_nothing_under_it():
    scenario = contended(bound="participation")
    network = next(plan_rounds(scenario, make_policy("dssda"), 1)).network
    instance = round_instance(scenario, network, Queues(np.full(8, 3.0), np.zeros(8)))
    for cluster in instance.clusters:
        assert (cluster.wS, cluster.wS2, cluster.wP, cluster.wG) == (0, 0, 0, 0)
        assert cluster.skip == pytest.approx(3.0 * 8 / 4)


def test_the_queue_keeps_every_clusters_share_where_speed_alone_does_not():
    # Cluster 0 is half as fast as the others.
    scenario = contended(bound="participation", participation_max=0.1, v=0.1)
    slow = tuple(replace(device, frequency=device.frequency / 2) for device in scenario.clusters[0])
    scenario = replace(scenario, clusters=(slow, *scenario.clusters[1:]))
    by_bound, by_speed = (
        np.array([r.selected for r in plan_rounds(s, make_policy("dssda"), 120)])
        for s in (scenario, replace(scenario, planner=replace(scenario.planner, v=1e6)))
    )
    assert by_speed.mean(axis=0)[0] == 0
    # Half the clusters train in each round; all of the time the bound lacks at most Y / T.
    assert by_bound.mean(axis=0).min() >= 0.9 * 0.5 - 0.05
    last = list(plan_rounds(scenario, make_policy("dssda"), 120))[-1]
    assert last.gamma.min() == pytest.approx(1 - 8 / 4) and last.gamma.max() == 1.0
