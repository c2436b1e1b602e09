"""A round with activations that stream up: against the longest path, and at the ends of its rates."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.system.scenario import load_scenario
from helpers.oracles import makespan
from strategies.planning.costs import costs_record, pipeline_work as work, round_costs
from strategies.planning.plan_demands import plan_times
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA
from strategies.planning.streamed_round import streamed_step


@functools.cache
def decided(name="table2-activations", **changes):
    scenario = load_scenario(name)
    scenario = replace(scenario, costs=replace(scenario.costs, **changes))
    return scenario, RoundPlanner(scenario, DSSDA(), power_control="exact").plan(1, [1.0] * scenario.num_clusters)


def rate_of(decision, n):
    part = decision.answer.clusters[n]
    return float(decision.instance.uplink_rate(n, part.power_w, part.channel))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_step_is_the_longest_path_through_devices_radio_and_decoder(schedule):
    _, decision = decided(downlink_rate=2e6, decoder_s=0.4)
    instance = decision.instance
    for n, plan in enumerate(decision.plans):
        plan = replace(plan, schedule=schedule)
        forward, backward, there, back, weights = (t.tolist() for t in plan_times(instance, n, plan))
        m, rate = plan.m, rate_of(decision, n)
        expected = makespan(
            schedule,
            [*forward, [0.4] * m],
            [*backward, [0.0] * m],
            [*there, [instance.z_enc_bits / rate] * m],
            [*back, [instance.z_enc_bits / 2e6] * m],
            [*weights, [0.0] * m],
            links=["blocking"] * len(there) + ["overlapping"],
            answers_at_once=True,
        )
        assert streamed_step(instance, n, plan, rate).makespan == pytest.approx(expected, rel=1e-12)


def test_activations_of_samples_follow_the_sizes_of_micro_batches():
    _, decision = decided("physical", upload_activation_bits=3e6, downlink_rate=5e6, decoder_s=0.01)
    plan = replace(decision.plans[0], m=3)
    events = streamed_step(decision.instance, 0, plan, 1e6).events
    last = len(plan.devices) - 1
    for i, size in enumerate(micro_batch_sizes(decision.instance.b, 3)):
        [up] = [e for e in events if (e.kind, e.place, e.micro_batch) == ("z", last, i)]
        [down] = [e for e in events if (e.kind, e.place, e.micro_batch) == ("g", last, i)]
        [decoder] = [e for e in events if (e.kind, e.place, e.micro_batch) == ("F", last + 1, i)]
        assert up.end - up.start == pytest.approx(3.0 * size)
        assert down.end - down.start == pytest.approx(0.6 * size)
        assert decoder.end - decoder.start == pytest.approx(0.01 * size)


def test_a_round_is_shorter_than_the_printed_sum_and_no_shorter_than_its_parts():
    _, decision = decided()
    costs, instance = round_costs(decision, work), decision.instance
    uploads = [instance.clusters[n].up.t_bits / rate_of(decision, n) for n in range(3)]
    pipelines = [c.work.pipeline_s for c in costs.clusters]
    activations = [float(instance.activation_bits(p.m)) / rate_of(decision, n) for n, p in enumerate(decision.plans)]
    together = max(max(p, a) for p, a in zip(pipelines, activations, strict=True))
    assert together + max(uploads) <= costs.latency_streamed_s
    one_after_the_other = max(p + a for p, a in zip(pipelines, activations, strict=True)) + max(uploads)
    assert costs.latency_streamed_s < one_after_the_other


def test_the_encoder_comes_down_first_where_the_downlink_has_a_rate():
    _, free = decided()
    _, fast = decided(downlink_rate=1e6)
    _, slow = decided(downlink_rate=1e5)
    before, between, after = (round_costs(d, work).latency_streamed_s for d in (free, fast, slow))
    # 19 Mbit of encoder. A second for a gradient is no more than the pipeline waits for anyway; ten seconds are.
    assert between == pytest.approx(before + 19.0)
    assert after > before + 190.0 + 50.0
    record = costs_record(slow, round_costs(slow, work), np.ones(3), load_scenario("table2-activations"))
    assert record["latency_streamed_s"] == after
