"""The paper's power iterations against the global optimum."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import draw, instance_to_dict
from strategies.dssda.answer import Infeasibility
from strategies.dssda.paper.sca import solve_power
from strategies.dssda.power import power_interval


def test_the_iterations_end_at_the_optimum_of_a_fine_grid():
    generator = np.random.default_rng(11)
    energy, feasible = 0, 0
    for _ in range(80):
        instance = draw(generator)
        weight = float(10 ** generator.uniform(-3, 1))
        best = oracles.cheapest_upload(instance_to_dict(instance), 0, 0, weight)
        found = solve_power(instance, 0, 0, latency_weight=weight)
        if isinstance(found, Infeasibility):
            assert best is None
            continue
        assert found.status == "converged"
        assert found.residual <= 1e-10
        assert found.objective == pytest.approx(best, rel=1e-6)
        low, high = power_interval(instance, 0, 0)
        assert low <= found.power_w <= high
        upload = oracles.Upload(instance_to_dict(instance), 0, 0)
        told = weight * upload.seconds(found.power_w) + upload.cost(found.power_w)
        assert found.objective == pytest.approx(float(told), rel=1e-9)
        energy += instance.clusters[0].wE > 0
        feasible += 1
    assert feasible > 30
    assert energy > 10


def test_a_limit_of_iterations_is_told():
    generator = np.random.default_rng(12)
    while True:
        instance = draw(generator, Emax=1e6, eps_max=None)
        found = solve_power(instance, 0, 0, latency_weight=0.1)
        if found.iterations > 3:
            break
    stopped = solve_power(instance, 0, 0, latency_weight=0.1, max_iterations=2)
    assert (stopped.status, stopped.iterations) == ("stopped", 2)
    assert stopped.residual > 1e-10
    assert stopped.objective > found.objective


def test_when_power_costs_nothing_the_largest_allowed_power_is_taken():
    instance = draw(np.random.default_rng(13), eps_max=None, Emax=1e6)
    instance = replace(instance, clusters=(replace(instance.clusters[0], wP=0.0, wE=0.0),))
    found = solve_power(instance, 0, 0, latency_weight=0.5)
    assert found.power_w == pytest.approx(power_interval(instance, 0, 0)[1], rel=1e-7)
