"""The baselines at their best, by trying all; and when a queue counts as level."""

import itertools

import numpy as np
import pytest

from client_pipeline.partition.plan import even_parts
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from experiments.queue_region import largest_gamma, levels_off
from experiments.tuned_baselines import (
    all_reduce_seconds,
    holm,
    proportional_parts,
    shared_batch_seconds,
    tuned_plan,
)
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance


@pytest.fixture(scope="module")
def instance():
    scenario = load_scenario("table2")
    return round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(3))


def test_parts_follow_the_speeds_within_what_memory_holds():
    assert proportional_parts(12, [3.0, 2.0, 1.0], [12, 12, 12]) == [6, 4, 2]
    assert proportional_parts(12, [3.0, 2.0, 1.0], [4, 12, 12]) == [4, 5, 3]
    assert proportional_parts(5, [100.0, 1.0, 1.0], [5, 5, 5]) == [3, 1, 1]
    assert proportional_parts(9, [1.0, 1.0], [4, 4]) is None
    assert proportional_parts(2, [1.0, 1.0], [4, 0]) is None


def test_a_tuned_plan_is_the_best_of_all_sizes_and_micro_batches(instance):
    devices = instance.device_arrays(0)
    speed = devices.phi * devices.f
    order = np.argsort(-speed, kind="stable")
    plan = tuned_plan(instance, 0, lambda size: even_parts(12, size))
    best = np.inf
    for size, m in itertools.product(range(1, 7), range(1, 65)):
        parts = [12 // size + (i < 12 % size) for i in range(size)]
        if any(parts[i] * instance.gamma0 > devices.mem[order[i]] for i in range(size)):
            continue
        stages, links = [], []
        for i, k in enumerate(order[:size]):
            link = (instance.z_bits + instance.g_bits) / devices.rate[k]
            stages.append(parts[i] * (64 / m * instance.o_f + instance.o_b) / speed[k] + link)
            links.append(link)
        seconds = (size + m - 1) * max(stages) - max(links)
        if seconds < best:
            best, chosen = seconds, (size, m)
    assert (len(plan.devices), plan.m) == chosen


def test_shares_of_a_batch_end_together_as_nearly_as_whole_samples_allow(instance):
    """No other way to hand out the samples is faster: the slowest device decides, one sample more would be later."""
    devices = instance.device_arrays(0)
    speed = devices.phi * devices.f
    found = shared_batch_seconds(instance, 0)

    def samples_within(seconds):
        return sum(max(0, int((seconds * v / 12 - instance.o_b) / instance.o_f + 1e-9)) for v in speed)

    assert samples_within(found) >= 64 > samples_within(found * (1 - 1e-6))
    # A ring sends 2 (K - 1) / K of what is averaged.
    assert all_reduce_seconds(instance, 0) == pytest.approx(2 * 5 / 6 * 19e6 / devices.rate.min())


def test_several_tests_are_corrected_by_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_queue_is_level_when_its_end_is_no_longer_than_its_middle():
    def parts(*queues):
        return [
            {"longest_queue": float(q), "gamma_1": 3.0, "gamma_2": 3.0 + i, "gamma_max": 3.4}
            for i, q in enumerate(queues)
        ]

    assert levels_off(parts(1, 5, 10, 10, 10))
    assert levels_off(parts(1, 5, 10, 9, 11.4))
    assert not levels_off(parts(1, 5, 10, 14, 18))
    assert levels_off(parts(0, 0, 0.1, 0.2, 0.5))
    # The second half of six parts, the cluster that has most.
    assert largest_gamma(parts(1, 1, 1, 1, 1, 1)) == pytest.approx(3.0 + (3 + 4 + 5) / 3)
