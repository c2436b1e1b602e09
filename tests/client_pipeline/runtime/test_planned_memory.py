"""Planned peak memory of a device beside what its stage counts, tensor by tensor, in a step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.families.fresh_base import FreshBase
from client_pipeline.families.hugging_face import sized_config, spec_from_config
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage, StepOrder, run_actions
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.costs import model_costs
from client_pipeline.system.scenario import load_scenario
from flower_app.training.round_closer import with_planned_memory
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.plan_demands import device_memory

WIDTH, LENGTH, BATCH_SIZE = 64, 32, 8
DELTA = (2, 1, 2)
SIZES = dict(width=WIDTH, num_heads=4, feed_forward=128, num_layers=6, dropout=0.0, max_length=64, key_value_heads=2)
LLAMA = spec_from_config(
    sized_config("llama", vocab_size=50, pad_id=0, bos_id=1, eos_id=2, **SIZES), "causal-lm", server_layers=1
)
ADAPTED = replace(LLAMA, lora=LoraConfig(rank=4, targets="all-linear"))


class Anyone:
    """A stage's neighbours: whatever it asks for is there, and what it sends goes nowhere."""

    size = len(DELTA) + 1

    def __init__(self, stage):
        self.rank = stage + 1

    def receive(self, shape, *_):
        return SimpleNamespace(wait=lambda: torch.randn(shape))

    def send(self, *_):
        pass

    flush = send


def counted_bytes(spec, plan, recompute, precision="float32", forward_only=False):
    """Return the peak bytes of each stage of a plan after one step."""
    base, peaks, first = FreshBase(spec, seed=0), [], 0
    order = StepOrder(
        step=StepId(seed=0, round=1, step=1, cluster=0),
        schedule=plan.schedule,
        sizes=micro_batch_sizes(BATCH_SIZE, plan.m),
        mask_BT=torch.ones(BATCH_SIZE, LENGTH, dtype=torch.bool),
        width=WIDTH,
        num_slices=plan.token_slices,
        forward_only=forward_only,
    )
    for number, num_blocks in enumerate(plan.delta):
        stage = Stage(spec, OptimizerConfig(name="adamw"), recompute, precision)
        for index in range(first, first + num_blocks):
            stage.place(index, MovedBlock(frozen=base.part(f"blocks.{index}.")))
        first += num_blocks
        run_actions(stage, Anyone(number), order)
        stage.apply(1, 1.0)
        peaks.append(stage.held_bytes())
    return peaks


def planned_round(spec, recompute, forward_only=False):
    """The planner's problem, by which it says the same of a plan."""
    scenario = load_scenario("two-clusters")
    passes = {"recompute": recompute, "forward_only": forward_only}
    costs = model_costs(spec, sequence_length=LENGTH, batch_size=BATCH_SIZE, **passes)
    settings = replace(scenario.planner, num_blocks=sum(DELTA), batch_size=BATCH_SIZE)
    network = replace(scenario, costs=costs, planner=settings)
    return round_instance(network, NetworkTrace(network).round(1), Queues.empty(network.num_clusters))


def of_three(schedule, m=4, **more):
    return ClusterPlan(delta=DELTA, order=(0, 1, 2), m=m, schedule=schedule, **more)


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_stage_holds_what_was_planned(recompute, base_dtype):
    """Without recomputation the plan of a stage that recomputes was four times what it held."""
    spec = replace(ADAPTED, base_dtype=base_dtype)
    instance = planned_round(spec, recompute)
    for plan in (of_three("gpipe"), of_three("1f1b")):
        counted = counted_bytes(spec, plan, recompute)
        assert device_memory(instance, plan) == pytest.approx(counted, rel=0.15), plan


@pytest.mark.parametrize("recompute", [False, True])
def test_token_slices_and_weights_that_wait_are_planned_too(recompute):
    instance = planned_round(ADAPTED, recompute)
    for plan in (of_three("gpipe", token_slices=4), of_three("zb-h1"), of_three("zb-h1", token_slices=2)):
        counted = counted_bytes(ADAPTED, plan, recompute)
        assert device_memory(instance, plan) == pytest.approx(counted, rel=0.15), plan


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_that_runs_forward_alone_holds_its_weights_and_nothing_else(recompute):
    spec = replace(ADAPTED, lora=replace(ADAPTED.lora, first_block=sum(DELTA)))
    instance = planned_round(spec, recompute, forward_only=True)
    for plan in (of_three("gpipe"), of_three("zb-h1"), of_three("1f1b", token_slices=2)):
        counted = counted_bytes(spec, plan, recompute, forward_only=True)
        assert device_memory(instance, plan) == pytest.approx(counted, rel=1e-9), plan


def test_recomputing_holds_the_activations_of_one_micro_batch_and_the_inputs_of_the_others():
    counts = {m: counted_bytes(ADAPTED, of_three("gpipe", m), True) for m in (1, 8)}
    kept = counted_bytes(ADAPTED, of_three("gpipe", 8), False)
    # A micro-batch of everything saves nothing but the positions' tables, which each micro-batch makes anew.
    assert counts[1] == pytest.approx(kept, rel=0.03)
    inputs = 4 * 7 * LENGTH * WIDTH
    at_rest = [round(weights) for weights in weights_and_states()]
    for whole, recomputed, rest in zip(counts[1], counts[8], at_rest, strict=True):
        assert recomputed - rest == pytest.approx((whole - rest) / 8 + inputs, rel=0.05)


def weights_and_states():
    """Return the bytes of each stage without activations."""
    held = model_costs(ADAPTED, sequence_length=LENGTH, batch_size=BATCH_SIZE).memory.held_bytes
    return [num_blocks * held for num_blocks in DELTA]


def test_a_backward_pass_that_recomputes_takes_a_forward_pass_more():
    options = dict(sequence_length=LENGTH, batch_size=BATCH_SIZE)
    plain, recomputed = (model_costs(ADAPTED, recompute=recompute, **options) for recompute in (False, True))
    assert recomputed.o_f == plain.o_f and recomputed.o_b == plain.o_b + plain.o_f
    assert recomputed.weight_share * recomputed.o_b == pytest.approx(plain.weight_share * plain.o_b)
    flop = plain.o_f + plain.o_b
    attention = plain.attention_share * flop
    assert 1.2 < recomputed.attention_share * (flop + plain.o_f) / attention < 1.6


def test_a_rounds_line_has_the_planned_bytes_beside_the_held_ones():
    report = {"cluster": 1, "devices": {"0": {"held_bytes": 90}, "2": {"held_bytes": 70}}, "loss": 0.5}
    costs = [{"cluster": 0}, {"cluster": 1, "device_memory_bytes": [100.4, 50.0, 0.0]}]
    written = with_planned_memory(report, {"virtual": {"clusters": costs}})
    assert written["devices"] == {"0": {"held_bytes": 90, "planned_bytes": 100}, "2": {"held_bytes": 70}}
    assert written["loss"] == 0.5 and "planned_bytes" not in report["devices"]["0"]
    # A strategy without costs, or a report without devices, is as it was.
    assert with_planned_memory(report, {})["devices"] == report["devices"]
