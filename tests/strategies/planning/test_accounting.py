"""Costs of a round: the simulator on real lists, uploads that wait for a channel, and paced devices."""

import dataclasses

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan, uniform_plan
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.event_simulator import simulate_pipeline
from client_pipeline.timetable.pacing import Pace
from helpers.oracles import gpipe_latency
from strategies.baselines.stock_accounting import queued_uploads, stock_record
from strategies.dssda.convergence import gamma
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import bound_parameters, round_instance
from strategies.planning.costs import costs_record, pipeline_work, round_costs
from strategies.planning.plan_demands import pipeline_of, plan_times
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy


@pytest.fixture(scope="module")
def decision():
    return RoundPlanner(load_scenario("table2"), make_policy("dssda")).plan(1, [np.inf] * 3)


def test_a_gpipe_step_with_even_micro_batches_has_its_closed_form(decision):
    plan = ClusterPlan(delta=(4, 0, 4, 0, 4, 0), order=(2, 0, 4), m=8)
    forward, backward, to_next, to_previous, _ = plan_times(decision.instance, 0, plan)
    expected = gpipe_latency(forward[:, 0], backward[:, 0], [*to_next[:, 0], 0.0], [*to_previous[:, 0], 0.0], plan.m)
    work = pipeline_work(decision.instance, 0, plan)
    assert work.pipeline_s == pytest.approx(expected)
    # z + g of 2.5 Mbit for each micro-batch, over the links after the first two devices.
    np.testing.assert_allclose(work.link_bytes, [8 * 2.5e6 / 8, 0, 8 * 2.5e6 / 8, 0, 0, 0])
    np.testing.assert_allclose(work.device_memory_bytes, np.array(plan.delta) * 0.375e9)


def test_the_round_waits_for_its_slowest_cluster(decision):
    costs = round_costs(decision, pipeline_work)
    steps = decision.instance.steps
    ends = [steps * c.work.pipeline_s + c.uplink_s for c in costs.clusters]
    assert costs.latency_s == max(ends)
    assert [c.waiting_s for c in costs.clusters] == pytest.approx([max(ends) - end for end in ends])
    alone = round_costs(decision, pipeline_work, [True, False, False])
    assert alone.latency_s == ends[0] and alone.clusters[1:] == [None, None]
    assert alone.energy_j < costs.energy_j


def test_a_device_computes_for_as_long_as_its_events_last(decision):
    for n, plan in enumerate(decision.plans):
        busy = np.zeros(len(plan.delta))
        for event in pipeline_of(decision.instance, n, plan).events:
            if event.kind in ("F", "B", "W"):
                busy[plan.devices[event.place]] += event.end - event.start
        np.testing.assert_allclose(pipeline_work(decision.instance, n, plan).device_s, busy)


def test_steps_whose_activations_are_with_the_server_cost_nothing(decision):
    steps = decision.instance.steps
    whole = round_costs(decision, pipeline_work)
    costs = round_costs(decision, pipeline_work, computed={0: steps / 2, 1: 0.0, 2: float(steps)})
    for one, all_steps, share in zip(costs.clusters, whole.clusters, (0.5, 0.0, 1.0), strict=True):
        assert one.train_s == pytest.approx(share * all_steps.train_s)
        assert one.uplink_s == pytest.approx(share * all_steps.uplink_s)
        np.testing.assert_allclose(one.work.device_s, share * all_steps.work.device_s)
        np.testing.assert_allclose(one.work.device_energy_j, share * all_steps.work.device_energy_j)
        np.testing.assert_allclose(one.work.link_bytes, share * all_steps.work.link_bytes)
    assert costs.latency_s == whole.clusters[2].train_s + whole.clusters[2].uplink_s
    record = costs_record(decision, costs, np.ones(3), load_scenario("table2"))
    bytes_up = [cluster["uplink_bytes"] for cluster in record["clusters"]]
    full = [c["uplink_bytes"] for c in costs_record(decision, whole, np.ones(3), load_scenario("table2"))["clusters"]]
    assert bytes_up == pytest.approx([full[0] / 2, 0.0, full[2]])


def test_uploads_of_a_stock_strategy_queue_for_the_channels(decision):
    one_channel = dataclasses.replace(
        decision.instance,
        clusters=tuple(dataclasses.replace(c, h=c.h[:1], I=c.I[:1], B=c.B[:1]) for c in decision.instance.clusters),
    )
    used, costs = queued_uploads(one_channel, decision.plans, [0, 1, 2])
    assert [link[0] for link in used] == [0, 0, 0]
    spans = sorted((c.train_s + c.uplink_wait_s, c.train_s + c.uplink_wait_s + c.uplink_s) for c in costs.clusters)
    assert all(before[1] <= after[0] + 1e-9 for before, after in zip(spans, spans[1:], strict=False))
    assert costs.latency_s == pytest.approx(spans[-1][1])
    free, apart = queued_uploads(decision.instance, decision.plans, [0, 1, 2])
    assert len({link[0] for link in free}) == 3 and apart.latency_s < costs.latency_s
    assert all(c.uplink_wait_s == 0 for c in apart.clusters)


def test_a_stock_round_is_recorded_for_those_that_trained():
    scenario = load_scenario("table2")
    plan = uniform_plan(
        speed=[d.speed for d in scenario.clusters[1]],
        memory=[1.5e9] * 6,
        block_memory=0.375e9,
        num_blocks=12,
        batch_size=64,
    )
    record = stock_record(scenario, 1, {1: plan})
    assert [c["selected"] for c in record["virtual"]["clusters"]] == [False, True, False]
    assert record["virtual"]["clusters"][1]["channel"] in range(4)
    assert record["virtual"]["latency_s"] > 0
    # 19 Mbit are 2.375 MB.
    assert record["virtual"]["clusters"][1]["uplink_bytes"] == scenario.costs.upload_time_bits / 8 == 2.375e6
    # The bound is that of what happened: it used to be that of a round in which nobody uploads.
    link = record["virtual"]["clusters"][1]
    instance = round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(3))
    expected = gamma(
        len(plan.segments()), 12, instance.distortion(1, link["power_w"], link["channel"]), bound_parameters(scenario)
    )
    bounds = [c["gamma"] for c in record["virtual"]["clusters"]]
    assert bounds[1] == pytest.approx(float(expected)) and bounds[1] != pytest.approx(bounds[0])


def test_a_pace_holds_each_stages_share_of_the_simulated_times(decision):
    plan = ClusterPlan(delta=(5, 0, 4, 0, 3, 0), order=(0, 2, 4), m=7)
    times = plan_times(decision.instance, 0, plan)
    pace = Pace.of(times, uplink_s=10.0, scale=0.5)
    forward, backward, to_next, to_previous, weights = times
    assert pace.uplink_s == 5.0
    assert pace.stages[1].forward_s == pytest.approx(0.5 * forward[1])
    assert pace.stages[1].forward_link_s == pytest.approx(0.5 * to_next[1])
    assert pace.stages[1].backward_link_s == pytest.approx(0.5 * to_previous[0])
    assert set(pace.stages[2].forward_link_s) == set(pace.stages[0].backward_link_s) == {0.0}
    assert Pace.from_dict(pace.to_dict()) == pace
    assert pace.stages[1].weight_s == pytest.approx(0.5 * weights[1])
    # All that the stages are busy with is all that the simulator has them do.
    busy = sum(sum(column) for stage in pace.stages for name, column in vars(stage).items() if name != "weight_s")
    events = simulate_pipeline("gpipe", *times).events
    assert busy == pytest.approx(0.5 * sum(event.end - event.start for event in events))
