"""Latency formulas against values worked out by hand, and against schedules run out."""

import numpy as np
import pytest

from client_pipeline.system.latency import (
    flow_shop_latency,
    link_time,
    micro_batch_work,
    pipeline_latency_paper,
    round_latency,
    stage_time,
    teb_time,
)
from client_pipeline.timetable.event_simulator import simulate_pipeline
from helpers.oracles import gpipe_latency


def test_work_of_a_micro_batch_counts_the_backward_pass_once_or_for_each_sample():
    assert float(micro_batch_work(2e9, 2e9, 8, "microbatch")) == 18e9
    assert float(micro_batch_work(2e9, 2e9, 8, "sample")) == 32e9
    assert float(micro_batch_work(2e9, 3e9, 64 / 12, "microbatch")) == pytest.approx(13.666667e9)


def test_times_of_a_teb_a_link_and_a_stage():
    assert float(teb_time(18e9, 18.0, 0.5e9)) == 2.0
    assert float(teb_time(18e9, 18.0, 0.5e9, overhead_s=0.25)) == 2.25
    assert float(link_time(2.5e6, 5e6)) == 0.5
    assert float(link_time(0.0, 5e6, latency_s=0.1)) == 0.1
    assert stage_time(np.array([3, 0]), np.array([2.0, 9.0]), np.array([0.5, 0.0])).tolist() == [6.5, 0.0]


def test_a_step_of_the_pipeline_is_eq_15():
    # (3 + 4 - 1) * 5 - 1
    assert pipeline_latency_paper([3.0, 5.0, 4.0], [1.0, 0.5, 0.25], 4) == 29.0
    assert pipeline_latency_paper([3.0, 5.0, 4.0], [1.0, 0.5, 0.25], 4, "none") == 30.0
    assert pipeline_latency_paper([3.0], [1.0], 1) == 2.0


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_the_flow_shop_is_the_recursion_of_its_completion_times(num_stages, m):
    stages = np.random.default_rng(10 * num_stages + m).uniform(0.1, 3.0, num_stages)
    done = np.zeros(num_stages)
    for _ in range(m):
        for s in range(num_stages):
            done[s] = max(done[s], done[s - 1] if s else 0.0) + stages[s]
    assert flow_shop_latency(list(stages), m) == pytest.approx(done[-1], rel=1e-12)


def test_closed_forms_of_the_flow_shop():
    assert flow_shop_latency([3.0, 5.0, 4.0], 4) == 27.0
    assert flow_shop_latency([2.0], 6) == 12.0
    assert flow_shop_latency([2.0, 2.0, 2.0], 4) == (3 + 4 - 1) * 2.0
    assert flow_shop_latency([2.0, 1.0], 1) == 3.0


def test_eq_15_without_its_tail_is_never_below_the_flow_shop_and_equal_for_even_stages():
    for seed in range(20):
        generator = np.random.default_rng(seed)
        stages, m = list(generator.uniform(0.0, 2.0, generator.integers(1, 7))), int(generator.integers(1, 20))
        assert pipeline_latency_paper(stages, [0.0] * len(stages), m) >= flow_shop_latency(stages, m) - 1e-12
    assert pipeline_latency_paper([2.0] * 4, [0.0] * 4, 6) == flow_shop_latency([2.0] * 4, 6)


def test_gpipe_by_hand_is_what_the_event_simulator_finds():
    # Forward 1 + 0.5 and 2: 3.5 + 2 * 2. Backward 3 + 0.25 (the last stage sends the gradient) and 2: 5.25 + 2 * 3.25.
    found = gpipe_latency([1.0, 2.0], [2.0, 3.0], [0.5, 0.0], [0.25, 0.0], 3)
    assert found == 7.5 + 11.75

    def each(*values):
        return np.repeat(np.array(values)[:, None], 3, axis=1)

    simulated = simulate_pipeline("gpipe", each(1.0, 2.0), each(2.0, 3.0), each(0.5), each(0.25))
    assert simulated.makespan == pytest.approx(found, rel=1e-12)


def test_gpipe_on_one_device_is_all_passes_in_a_row():
    assert gpipe_latency([1.5], [2.5], [0.0], [0.0], 5) == 20.0


def test_a_round_waits_for_its_slowest_cluster_eq_26():
    assert round_latency([2.0, 1.0], [3.0, 8.0], local_steps=5) == 13.0
    assert round_latency([2.0, 1.0], [3.0, 8.0], local_steps=6) == 15.0
    assert round_latency([], [], local_steps=5) == 0.0
