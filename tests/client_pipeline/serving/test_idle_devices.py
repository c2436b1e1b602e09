"""Devices of a cluster that answers stay, however long nobody asks."""

import time

import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import block_weights
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.answering_devices import DeviceStages
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.stage.answering import AnswerStep
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.timetable.replanning import answering_plans, equal_devices
from helpers.decoder_only import small_spec

IDLE_S = 8.0


def test_devices_that_nobody_asks_do_not_end_themselves(local_ray):
    parts = build_parts(small_spec("llama"), seed=0)
    num_blocks, weights = len(parts.blocks), parts.weights()
    pipeline = Pipeline(
        name="collapipe/idle/cluster-0",
        spec=parts.spec,
        optimizer=OptimizerConfig(name="sgd"),
        runtime=RuntimeConfig(actor_idle=IDLE_S),
    )
    plan_for = answering_plans(equal_devices(1, num_blocks), 1, num_blocks)
    stages = DeviceStages(pipeline, plan_for, 1, {i: block_weights(weights, i) for i in range(num_blocks)})
    try:
        step = AnswerStep(requests=("one",), num_rows=(1,), mask_RK=torch.ones(1, 3, dtype=torch.bool))
        states = parts.embedding.eval().step(torch.tensor([[1, 2, 3]]), step.mask_RK)
        first, pid = stages.run(step, states).result(120), pipeline.pool.pids[0]
        stages.drop(["one"])
        time.sleep(2.5 * IDLE_S)
        torch.testing.assert_close(stages.run(step, states).result(120), first)
        assert pipeline.pool.silent([0]) == {} and pipeline.pool.pids[0] == pid
    finally:
        stages.close()


def test_all_devices_take_part_as_far_as_there_are_tebs():
    for num_devices, num_blocks in ((1, 4), (3, 4), (4, 4), (6, 4)):
        plan_for = answering_plans(equal_devices(num_devices, num_blocks), num_devices, num_blocks)
        delta = plan_for(range(num_devices)).delta
        assert sum(delta) == num_blocks and sum(map(bool, delta)) == min(num_devices, num_blocks)
        assert plan_for([num_devices - 1]).delta[num_devices - 1] == num_blocks
