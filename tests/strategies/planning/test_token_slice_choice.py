"""Token slices as a decision: against all of them tried by hand, with memory counted slice by slice."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.schedules import SCHEDULES, actions
from helpers.instances import drawn_plan, random_instance
from helpers.sliced_pipelines import sliced_makespan
from strategies.dssda.instance_file import parse_instance
from strategies.planning.costs import costs_record, pipeline_work, round_costs
from strategies.planning.dry_run import plan_rounds
from strategies.planning.pipeline_choices import AUTO_SLICES, PipelineChoices
from strategies.planning.plan_demands import device_memory, plan_times
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA
from strategies.planning.schedule_choice import best_schedule, simulated_seconds
from strategies.planning.streamed_round import streamed_step


def drawn(generator):
    """A cluster with all devices in use, overheads of any size, and activations of any size."""
    devices = int(generator.integers(1, 5))
    raw = random_instance(generator, num_clusters=1, num_channels=1, num_devices=devices)
    raw["L"] = int(generator.integers(devices, 7))
    raw["b"] = int(generator.integers(1, 5))
    raw["m_set"] = [1]
    raw["work"]["t0"] *= float(generator.choice([0.0, 0.1, 1.0]))
    raw["act"]["lat"] *= float(generator.choice([0.0, 0.1, 1.0]))
    raw["work"]["attention_share"] = float(generator.choice([0.0, 0.1, 1.0]))
    raw["gamma_act"] = float(generator.choice([0.0, 0.9])) * raw["gamma0"]
    raw["kept_keys_share"] = float(generator.uniform(0.0, 0.5))
    instance = parse_instance(raw, "drawn")
    return instance, drawn_plan(generator, instance, devices)


def memory_by_slices(instance, plan):
    """Each device's memory, from what the micro-batches that it holds keep slice by slice."""
    sizes, memory, slices = micro_batch_sizes(instance.b, plan.m), [0.0] * len(plan.delta), plan.token_slices
    # Keys and values of the slices that each slice's attention sees; and of a slice for later ones, if there are any.
    keys = sum((q + 1) / slices + (1 / slices if q < slices - 1 else 0) for q in range(slices))
    whole = instance.gamma_act / instance.b
    of_sample = whole * (1 + instance.kept_keys_share * (keys - 1))
    for stage, device in enumerate(plan.order):
        kept, most = 0.0, 0.0
        for kind, i in actions(plan.schedule, stage, len(plan.order), plan.m):
            # What waits for weight gradients counts as the micro-batch without slices.
            waits = whole if plan.schedule == "zb-h1" else 0.0
            kept += sizes[i] * {"F": of_sample, "B": waits - of_sample, "W": -waits}[kind]
            most = max(most, kept)
        memory[device] = plan.delta[device] * (instance.gamma0 - instance.gamma_act + most)
    return memory


def test_slices_and_schedule_are_the_fastest_pair_that_fits_the_devices():
    generator, chosen = np.random.default_rng(5), set()
    for _ in range(150):
        instance, plan = drawn(generator)
        tried = {}
        for schedule in SCHEDULES:
            for number in AUTO_SLICES:
                cut = replace(plan, schedule=schedule, token_slices=number)
                memory = memory_by_slices(instance, cut)
                assert device_memory(instance, cut) == pytest.approx(memory)
                if all(n <= d.mem * (1 + 1e-9) for n, d in zip(memory, instance.clusters[0].devices, strict=True)):
                    seconds = sliced_makespan(schedule, plan_times(instance, 0, cut), number)
                    tried[schedule, number] = seconds, sum(memory)
        choices = PipelineChoices.of("auto", 0)
        found = best_schedule(instance, 0, plan, choices, simulated_seconds(instance))
        if not tried:
            assert found is None
            continue
        chosen.add(found.token_slices)
        seconds, memory = tried[found.schedule, found.token_slices]
        assert seconds <= min(s for s, _ in tried.values()) * (1 + 2e-9)
        assert memory <= min(n for s, n in tried.values() if s <= seconds * (1 - 2e-9) or s == seconds) * (1 + 1e-9)
        assert (found.delta, found.order, found.m) == (plan.delta, plan.order, plan.m)
    assert chosen == set(AUTO_SLICES)


def bound_by_batch(seed=0, **costs):
    """``table2`` with a batch of four, which bounds m."""
    scenario = load_scenario("table2", seed)
    settings = replace(scenario.planner, batch_size=4, max_micro_batches=4)
    return replace(scenario, planner=settings, costs=replace(scenario.costs, **costs))


def test_automatic_slices_shorten_rounds_whose_m_is_bound_by_the_batch_and_nothing_else_of_the_plan_moves():
    whole, cut = (next(plan_rounds(bound_by_batch(), DSSDA(), 1, token_slices=number)) for number in (1, 0))
    assert cut.answer.to_dict() == whole.answer.to_dict() and cut.violations == []
    seconds = simulated_seconds(cut.instance)
    for n, (before, after) in enumerate(zip(whole.plans, cut.plans, strict=True)):
        times = {number: seconds(n, replace(before, token_slices=number)) for number in AUTO_SLICES}
        assert after == replace(before, token_slices=min(times, key=times.get))
    assert cut.costs.latency_s < whole.costs.latency_s
    # The closed expressions know no slices.
    assert cut.costs.latency_eq15_s == whole.costs.latency_eq15_s


def test_a_number_that_is_asked_for_is_taken_and_the_rounds_line_says_it():
    scenario = bound_by_batch()
    planner = RoundPlanner(scenario, DSSDA(), token_slices=4)
    decision = planner.plan(1, [1.0] * 3)
    assert {plan.token_slices for plan in decision.plans} == {4}
    gamma = planner.settle(decision)
    record = costs_record(decision, round_costs(decision, pipeline_work), gamma, scenario)
    assert [cluster["token_slices"] for cluster in record["clusters"]] == [4, 4, 4]


def test_streamed_slices_are_joined_before_they_go_up_and_cut_when_they_have_come_down():
    scenario = bound_by_batch(upload_activation_bits=2e6, downlink_rate=1e6, decoder_s=0.5)
    decision = RoundPlanner(scenario, DSSDA(), token_slices=2).plan(1, [1.0] * 3)
    plan, rate = decision.plans[0], 1e6
    events = streamed_step(decision.instance, 0, plan, rate).events
    last = len(plan.devices) - 1
    up, down = (
        [(e.micro_batch, round(e.end - e.start, 9)) for e in events if e.kind == kind and e.place == last]
        for kind in "zg"
    )
    assert up == [(i, 2.0 * (i % 2)) for i in range(2 * plan.m)]
    assert sorted(down) == [(i, 2.0 * (i % 2)) for i in range(2 * plan.m)]


def test_numbers_out_of_range_and_measured_costs_are_refused():
    with pytest.raises(ValueError, match="planner.token-slices: expected 0, .* to 64, found -1"):
        RoundPlanner(load_scenario("table2"), DSSDA(), token_slices=-1)
    with pytest.raises(ValueError, match="--token-slices: expected 0, .* to 64, found 65"):
        PipelineChoices.of("", 65, "--")
