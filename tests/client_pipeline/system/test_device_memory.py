"""Planned peak memory of a device, by hand and against what its matrices and passes take."""

from dataclasses import replace

import pytest

from client_pipeline.partition.plan import micro_batch_sizes, whole_blocks
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.system.costs import model_costs, teb_costs
from client_pipeline.system.device_memory import TebMemory
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.schedules import held_at_backward
from helpers.tiny_models import tiny_spec
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy


@pytest.mark.parametrize(("memory", "block", "blocks"), [(0.201e9, 0.067e9, 3), (0.2009e9, 0.067e9, 2), (1e9, 0.0, 12)])
def test_memory_holds_as_many_tebs_as_it_is_whole_multiples_of_one(memory, block, blocks):
    assert whole_blocks(memory, block, 12) == blocks
    # Sizes as files have them: in GB.
    sizes = [size / 1e3 * 1e9 for size in range(1, 2000)]
    assert all(whole_blocks(n * size / 1e9 * 1e9, size, 24) == n for size in sizes for n in (3, 7, 24))
    assert whole_blocks(float("inf"), 1.0, 12) == 12


MEMORY = TebMemory(
    held_bytes=1000.0,
    saved_sample_bytes=100.0,
    activation_sample_bytes=10.0,
    pass_bytes=7.0,
    pass_sample_bytes=3.0,
)
LLAMA = replace(tiny_spec("llama"), lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [("gpipe", (8, 8, 8)), ("1f1b", (6, 4, 2)), ("zb-h1", (6, 6, 6))],
    ids=lambda value: str(value),
)
def test_a_stage_keeps_the_micro_batches_of_its_schedule(schedule, kept):
    for stage, (blocks, samples) in enumerate(zip((3, 1, 2), kept, strict=True)):
        moments = held_at_backward(schedule, stage, 3, 4)
        expected = blocks * 1000 + samples * (blocks * 100 + 10) + 7 + 2 * 3 + 8 * 10
        assert MEMORY.stage_peak(blocks, moments, [2, 2, 2, 2]) == expected


def test_teb_by_teb_and_beside_them_no_plan_needs_more_than_is_counted():
    for m in (1, 2, 5, 8):
        peak = MEMORY.stage_peak(3, held_at_backward("gpipe", 0, 3, m), micro_batch_sizes(8, m))
        most = 3 * MEMORY.block_memory(8) + MEMORY.device_memory(8)
        assert peak <= most and (peak == most) == (m == 1)


def test_frozen_matrices_count_as_they_are_held_and_what_brings_them_back_for_a_moment():
    teb = {name: teb_costs(replace(LLAMA, base_dtype=name), 4) for name in ("float32", "bfloat16", "int8", "nf4")}
    # 16 -> 16, 8, 8 and 16 of the attention, three of 16 x 32.
    frozen, rows = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32, 16 + 8 + 8 + 16 + 32 + 32 + 16
    whole = teb["float32"]
    assert whole.parameter_bytes - teb["bfloat16"].parameter_bytes == 2 * frozen
    assert whole.parameter_bytes - teb["int8"].parameter_bytes == 3 * frozen - 4 * rows
    assert teb["float32"].pass_bytes == 0 < teb["bfloat16"].pass_bytes < teb["int8"].pass_bytes
    assert {teb[dtype].num_parameters for dtype in ("float32", "int8", "nf4")} == {whole.num_parameters}
    assert {teb[dtype].forward_flop for dtype in ("float32", "int8", "nf4")} == {whole.forward_flop}


def test_the_planner_counts_tebs_in_what_a_device_has_left():
    scenario = load_scenario("two-clusters")
    costs = model_costs(LLAMA, sequence_length=8, batch_size=scenario.planner.batch_size)
    assert costs.memory is not None and costs.device_memory > 0
    room = 2 * costs.block_memory + costs.device_memory

    def held(memory):
        clusters = tuple(tuple(replace(d, memory=memory) for d in devices) for devices in scenario.clusters)
        network = replace(scenario, clusters=clusters, costs=replace(scenario.costs, **memories(costs)))
        decision = RoundPlanner(network, make_policy("dssda")).plan(1, [1.0] * scenario.num_clusters)
        return max(max(plan.delta) for plan in decision.plans)

    assert held(room) <= 2
    assert held(room - 1) <= 1


def memories(costs):
    return {name: getattr(costs, name) for name in ("block_memory", "device_memory", "memory")}
