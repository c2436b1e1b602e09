"""What a pipeline of real Ray actors does when a device dies, the decoder fails or the plan changes."""

import os
import re
import signal
import threading
import time

import psutil
import pytest
import torch

from client_pipeline.link.base import LinkError
from client_pipeline.partition import transformer
from client_pipeline.partition.families import build_parts
from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.decoder_update import HeadTrainer
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.placement import Placement
from helpers.local_head import LocalHead
from helpers.shared_actors import shared_but

NUM_BLOCKS = 4
SPEC = transformer.spec(
    vocab_size=30, width=16, num_heads=2, feed_forward=32, encoder_layers=NUM_BLOCKS, decoder_layers=1, dropout=0.1
)
ADAMW = OptimizerConfig(name="adamw", lr=0.01)
TWO = ClusterPlan(delta=(2, 2, 0), order=(0, 1), m=4)
OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")
THREE = ClusterPlan(delta=(1, 2, 1), order=(0, 1, 2), m=4, schedule="1f1b")

GROUP_TIMEOUT_S = 200.0
"""Far above HANG_S: a test that ends did not end by waiting for this."""
HANG_S = 60.0


@pytest.fixture(scope="module")
def make_pipeline(local_ray):
    from client_pipeline.runtime.pipeline import Pipeline

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


def within_bounds(function, *args):
    """Result or exception of a call that must not hang."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "the call hangs"
    return outcome[0]


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


def test_a_failing_link_surfaces_and_the_pipeline_works_again(pipeline):
    def fail():
        raise LinkError("the decoder said no")

    cluster = Cluster(pipeline, THREE)
    expected = cluster.step(1).loss_sum
    gradients = pipeline.gradients()
    pipeline.discard()
    for at in (0, 1, 3):
        error = within_bounds(cluster.step, 1, Interrupted(cluster.trainer, fail, at))
        assert isinstance(error, LinkError) and "the decoder said no" in str(error)
        within_bounds(pipeline.apply_plan, THREE)
        assert within_bounds(cluster.step, 1).loss_sum == expected
        # Nothing of the step that failed is left in the gradients.
        for index, block in pipeline.gradients().items():
            for name, gradient in block.items():
                assert torch.equal(gradient, gradients[index][name]), (at, index, name)
        pipeline.discard()


def test_a_link_that_never_answers_does_not_keep_the_next_step_waiting(pipeline):
    released = threading.Event()
    cluster = Cluster(pipeline, TWO)
    link = Interrupted(cluster.trainer, lambda: released.wait(3 * HANG_S), at=0)
    send = link.send

    def break_at_two(micro_batch, *rest):
        if micro_batch == 2:
            raise LinkError("the stream broke")
        send(micro_batch, *rest)

    link.send = break_at_two
    try:
        error = within_bounds(cluster.step, 1, link)
        assert isinstance(error, LinkError) and "the stream broke" in str(error)
        # One thread still waits inside the old link.
        within_bounds(pipeline.apply_plan, TWO)
        assert within_bounds(cluster.step, 2).weight == 30
    finally:
        released.set()
        pipeline.discard()


def test_a_device_that_fails_is_named_with_its_error(pipeline):
    from client_pipeline.runtime.faults import PipelineError

    cluster = Cluster(pipeline, THREE)
    pipeline.schedule = "zigzag"
    error = within_bounds(cluster.step, 1)
    assert isinstance(error, PipelineError)
    assert re.search(r"device \d: it failed: schedule: expected one of gpipe, 1f1b, zb-h1, found 'zigzag'", str(error))
    within_bounds(pipeline.apply_plan, THREE)
    assert within_bounds(cluster.step, 1).weight == 30
    pipeline.discard()


def test_a_step_without_a_plan_is_refused(pipeline):
    from client_pipeline.runtime.faults import PipelineError

    cluster = Cluster(pipeline, TWO)
    pipeline.disconnect()
    with pytest.raises(PipelineError, match="no plan is applied"):
        cluster.step(1)


def test_a_new_plan_moves_only_the_tebs_whose_owner_changed(pipeline):
    def apply(delta, order, **changes):
        """TEBs that moved, and who holds what afterwards."""
        blocks, sent = pipeline.moved_blocks, pipeline.moved_bytes
        pipeline.apply_plan(ClusterPlan(delta=delta, order=order, **{"m": 4, **changes}))
        held = {device: status["blocks"] for device, status in pipeline.status().items()}
        teb = sum(value.nbytes for value in pipeline.weights()[0].values())
        # No step has been taken: there is no optimizer state yet, so bytes are those of the weights.
        assert pipeline.moved_bytes - sent == (pipeline.moved_blocks - blocks) * teb
        return pipeline.moved_blocks - blocks, held

    apply((1, 2, 1), (0, 1, 2))
    pids = {device: status["pid"] for device, status in pipeline.status().items()}
    assert apply((1, 2, 1), (0, 1, 2), m=2, schedule="1f1b") == (0, {0: [0], 1: [1, 2], 2: [3]})
    assert apply((2, 2, 0), (0, 1)) == (2, {0: [0, 1], 1: [2, 3]})
    assert apply((1, 3, 0), (0, 1)) == (1, {0: [0], 1: [1, 2, 3]})
    assert apply((1, 3, 0), (1, 0)) == (2, {1: [0, 1, 2], 0: [3]})
    assert apply((1, 2, 1), (1, 0, 2)) == (2, {1: [0, 1], 0: [2], 2: [3]})
    # The processes are the same as before.
    assert {device: status["pid"] for device, status in pipeline.status().items()} == pids


def test_moved_tebs_keep_their_optimizer_state(make_pipeline):
    stays = Cluster(make_pipeline(shared_but()), ClusterPlan(delta=(4,), order=(0,), m=4))
    moves = Cluster(make_pipeline(shared_but()), TWO)
    plans = [TWO, ClusterPlan(delta=(1, 3), order=(1, 0), m=4), ClusterPlan(delta=(1, 3), order=(0, 1), m=4)]
    for number, plan in enumerate(plans, 1):
        moves.pipeline.apply_plan(plan)
        for cluster in (stays, moves):
            cluster.step(number, apply_step=number)
    assert moves.pipeline.moved_blocks == 5
    weights, state, _ = moves.pipeline.committed_blocks()[0]
    assert state.keys() == {f"{name}/{kind}" for name in weights for kind in OPTIMIZER_STATE}
    assert moves.pipeline.moved_bytes == 5 * sum(value.nbytes for part in (weights, state) for value in part.values())
    start, expected, found = stays.parts.weights(), stays.pipeline.weights(), moves.pipeline.weights()
    for index in range(NUM_BLOCKS):
        for name, value in expected[index].items():
            assert torch.equal(value, found[index][name]), (index, name)
            assert not torch.equal(value, start[f"blocks.{index}.{name}"]), (index, name)


def assert_copied(pipeline, expected):
    """The last copies of all TEBs are these weights, each with an optimizer state."""
    found = pipeline.committed_blocks()
    assert list(found) == list(range(NUM_BLOCKS))
    for index, block in found.items():
        assert block.weights.keys() == expected[index].keys() and block.optimizer
        assert all(torch.equal(value, expected[index][name]) for name, value in block.weights.items())


def test_a_device_that_is_killed_has_left_a_copy_and_is_named_if_that_is_in_the_middle_of_a_run(make_pipeline):
    from client_pipeline.runtime.faults import PipelineError

    cluster = Cluster(make_pipeline(shared_but(1, 2)), THREE)
    pids = {device: status["pid"] for device, status in cluster.pipeline.status().items()}
    for number in (1, 2):
        assert cluster.step(number, apply_step=number).weight == 30
    expected = cluster.pipeline.weights()
    link = Interrupted(cluster.trainer, lambda: os.kill(pids[1], signal.SIGKILL))
    error = within_bounds(cluster.step, 3, link)
    assert isinstance(error, PipelineError)
    assert "device 1: its process ended" in str(error)
    assert_copied(cluster.pipeline, expected)

    # The two that are left take a step, after which one of them is killed.
    assert cluster.pipeline.give_up_silent().keys() == {1}
    cluster.pipeline.apply_plan(ClusterPlan(delta=(2, 0, 2), order=(0, 2), m=4))
    assert cluster.step(3, apply_step=3).weight == 30
    stepped = cluster.pipeline.weights()
    assert not any(torch.equal(stepped[i][name], value) for i in expected for name, value in expected[i].items())
    os.kill(pids[2], signal.SIGKILL)
    assert_copied(cluster.pipeline, stepped)


def test_a_device_that_freezes_is_named_long_before_the_timeout(make_pipeline):
    from client_pipeline.runtime.faults import FROZEN, DeviceFault

    cluster = Cluster(make_pipeline(shared_but(1)), TWO)
    pid = cluster.pipeline.status()[1]["pid"]
    cluster.step(1, apply_step=1)
    os.kill(pid, signal.SIGSTOP)
    error = within_bounds(cluster.step, 2)
    assert isinstance(error, DeviceFault) and (error.kind, error.devices) == (FROZEN, (1,))
    assert "device 1: no answer" in str(error)


def test_an_actor_ends_itself_when_idle_but_not_while_it_works(make_pipeline):
    idle_s = 4.0
    cluster = Cluster(make_pipeline(actor_idle=idle_s), ClusterPlan(delta=(4,), order=(0,), m=2))
    pid = cluster.pipeline.status()[0]["pid"]
    # A decoder that takes longer than the idle time: the device waits for it inside its step.
    cluster.step(1, Interrupted(cluster.trainer, lambda: time.sleep(1.5 * idle_s), at=0))
    assert psutil.pid_exists(pid)
    _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=HANG_S)
    assert not alive
