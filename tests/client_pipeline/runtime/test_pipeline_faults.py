"""A pipeline of real Ray actors when a device dies, the decoder fails or the plan changes."""

import time

import psutil
import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.local_head import LocalHead

NUM_BLOCKS = 4
SPEC = transformer.spec(
    vocab_size=30, width=16, num_heads=2, feed_forward=32, encoder_layers=NUM_BLOCKS, decoder_layers=1, dropout=0.1
)
ADAMW = OptimizerConfig(name="adamw", lr=0.01)
GROUP_TIMEOUT_S = 200.0
"""Far above HANG_S: a test that ends did not end by waiting for this."""
HANG_S = 60.0


@pytest.fixture(scope="module")
def make_pipeline(local_ray):
    from client_pipeline.runtime.devices.pipeline import Pipeline

    made = []

    def make(placement=Placement(), **runtime):  # noqa: B008 (it is frozen)
        runtime = RuntimeConfig(**{"timeout": GROUP_TIMEOUT_S, **runtime})
        name = f"test-faults-{len(made)}"
        made.append(Pipeline(name=name, spec=SPEC, optimizer=ADAMW, runtime=runtime, placement=placement))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


@pytest.fixture(scope="module")
def pipeline(make_pipeline):
    """One for all tests that leave its devices alive, each in a process of its own: these take seconds to start."""
    return make_pipeline()


class Cluster:
    """A pipeline with an embedding and a decoder beside it, and a batch that changes with the step."""

    def __init__(self, pipeline, plan):
        self.parts = build_parts(SPEC, seed=1)
        self.pipeline = pipeline
        self.trainer = HeadTrainer(self.parts.head, ADAMW, unit=NUM_BLOCKS)
        pipeline.apply_plan(plan)
        weights = self.parts.weights()
        pipeline.load({i: block_weights(weights, i) for i in range(NUM_BLOCKS)})

    def step(self, number, link=None, apply_step=None):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 30, (6, 5), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones(6, 5, dtype=torch.bool), "labels": ids.flip(1)}
        step = StepId(seed=0, round=1, step=number, cluster=0)
        self.trainer.discard(0)
        link = LocalHead(self.trainer) if link is None else link
        return self.pipeline.run_step(step, [batch], self.parts.embedding, link, apply_step, commits=True)


class Interrupted(LocalHead):
    """Calls ``act`` while micro-batch ``at`` waits for its gradient: in the middle of a step."""

    def __init__(self, trainer, act, at=1):
        super().__init__(trainer)
        self.act, self.at = act, at

    def receive(self):
        gradient = super().receive()
        if gradient.micro_batch == self.at:
            self.act()
        return gradient


def test_a_new_plan_moves_only_the_tebs_whose_owner_changed(pipeline):
    def apply(delta, order, **changes):
        """TEBs that moved, and who holds what afterwards."""
        blocks, sent = pipeline.placement.moved_blocks, pipeline.placement.moved_bytes
        pipeline.apply_plan(ClusterPlan(delta=delta, order=order, **{"m": 4, **changes}))
        held = {device: status["blocks"] for device, status in pipeline.status().items()}
        teb = sum(value.nbytes for value in pipeline.weights()[0].values())
        # No step has been taken: there is no optimizer state yet, so bytes are those of the weights.
        assert pipeline.placement.moved_bytes - sent == (pipeline.placement.moved_blocks - blocks) * teb
        return pipeline.placement.moved_blocks - blocks, held

    apply((1, 2, 1), (0, 1, 2))
    pids = {device: status["pid"] for device, status in pipeline.status().items()}
    assert apply((1, 2, 1), (0, 1, 2), m=2, schedule="1f1b") == (0, {0: [0], 1: [1, 2], 2: [3]})
    assert apply((2, 2, 0), (0, 1)) == (2, {0: [0, 1], 1: [2, 3]})
    assert apply((1, 3, 0), (0, 1)) == (1, {0: [0], 1: [1, 2, 3]})
    assert apply((1, 3, 0), (1, 0)) == (2, {1: [0, 1, 2], 0: [3]})
    assert apply((1, 2, 1), (1, 0, 2)) == (2, {1: [0, 1], 0: [2], 2: [3]})
    # The processes are the same as before.
    assert {device: status["pid"] for device, status in pipeline.status().items()} == pids


def test_an_actor_ends_itself_when_idle_but_not_while_it_works(make_pipeline):
    idle_s = 4.0
    cluster = Cluster(make_pipeline(actor_idle=idle_s), ClusterPlan(delta=(4,), order=(0,), m=2))
    pid = cluster.pipeline.status()[0]["pid"]
    # A decoder that takes longer than the idle time: the device waits for it inside its step.
    cluster.step(1, Interrupted(cluster.trainer, lambda: time.sleep(1.5 * idle_s), at=0))
    assert psutil.pid_exists(pid)
    _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=HANG_S)
    assert not alive
