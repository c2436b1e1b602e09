"""Stages over gloo without Ray: threads of one process stand for the devices."""

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage, StepOrder, run_actions
from client_pipeline.runtime.transport.transport import (
    BACKWARD,
    FORWARD,
    GlooTransport,
    GroupAddress,
    TransportError,
    open_store,
)
from client_pipeline.timetable.schedules import SCHEDULES
from helpers.rings import Threads, make_ring

SGD = OptimizerConfig(name="sgd", lr=0.1)
NUM_BLOCKS = 4
SPEC = transformer.spec(vocab_size=20, width=8, num_heads=2, feed_forward=16, encoder_layers=NUM_BLOCKS, dropout=0.1)
STEP = StepId(seed=0, round=1, step=1, cluster=0)


def make_stages(delta, weights, recompute):
    stages = []
    for segment in ClusterPlan(delta=delta, order=tuple(range(len(delta))), m=1).segments():
        stage = Stage(SPEC, SGD, recompute=recompute)
        for index in segment.blocks:
            stage.place(index, MovedBlock(block_weights(weights, index)))
        stages.append(stage)
    return stages


def run_control_unit(transport, x_BTD, sizes):
    """Rank 0: activations in, activations out, and each output times 2 back as its gradient."""
    last = transport.size - 1
    pieces = x_BTD.split(sizes)
    for i, piece in enumerate(pieces):
        transport.send(piece, 1, FORWARD, i)
    outputs, gradients = [], []
    for i, piece in enumerate(pieces):
        outputs.append(transport.receive(tuple(piece.shape), last, FORWARD, i).wait())
        transport.send(2 * outputs[i], last, BACKWARD, i)
    for i, piece in enumerate(pieces):
        gradients.append(transport.receive(tuple(piece.shape), 1, BACKWARD, i).wait())
    transport.flush()
    return torch.cat(outputs), torch.cat(gradients)


def run_pipeline(delta, schedule, m, recompute=False, batch_size=7, length=5):
    """One step of all stages; returns the stages, the output and the input's gradient."""
    weights = build_parts(SPEC, seed=1).weights()
    stages = make_stages(delta, weights, recompute)
    torch.manual_seed(5)
    x_BTD = torch.randn(batch_size, length, 8)
    mask_BT = torch.ones(batch_size, length, dtype=torch.bool)
    mask_BT[2, 3:] = False
    sizes = micro_batch_sizes(batch_size, m)
    order = StepOrder(step=STEP, schedule=schedule, sizes=sizes, mask_BT=mask_BT, width=8)
    ring = make_ring(len(stages) + 1)
    results = Threads(
        lambda: run_control_unit(ring[0], x_BTD, sizes),
        *(
            lambda s=stage, t=transport: run_actions(s, t, order)
            for stage, transport in zip(stages, ring[1:], strict=True)
        ),
    ).join()
    for transport in ring:
        transport.close()
    for result in results:
        assert not isinstance(result, Exception), result
    return stages, *results[0]


def all_gradients(stages):
    return {
        f"{i}.{name}": gradient
        for stage in stages
        for i, block in stage.gradients().items()
        for name, gradient in block.items()
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_zb_h1_gives_the_gradients_of_1f1b_and_holds_as_many_micro_batches_on_every_stage(recompute):
    delta, m = (1, 2, 1), 6
    one_f_one_b, output, x_gradient = run_pipeline(delta, "1f1b", m, recompute)
    zb_h1, found_output, found_gradient = run_pipeline(delta, "zb-h1", m, recompute)
    assert [stage.peak_stored for stage in zb_h1] == [len(delta)] * len(delta)
    assert torch.equal(found_output, output)
    torch.testing.assert_close(found_gradient, x_gradient, rtol=1e-5, atol=1e-6)
    expected = all_gradients(one_f_one_b)
    for name, gradient in all_gradients(zb_h1).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    # What waits is less than what a forward pass keeps: no stage stores more than the first one of 1F1B.
    peaks = [stage.activations.peak_bytes / len(stage.blocks) for stage in zb_h1]
    if not recompute:
        assert max(peaks) <= one_f_one_b[0].activations.peak_bytes
    assert all(stage.activations.peak_bytes > 0 and not stage._waiting for stage in zb_h1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("delta", [(2, 2), (1, 1, 1, 1)])
def test_1f1b_stores_the_activations_of_no_more_than_s_micro_batches(delta, recompute):
    m = 6
    one_f_one_b, output, x_gradient = run_pipeline(delta, "1f1b", m, recompute)
    assert [stage.peak_stored for stage in one_f_one_b] == [len(delta) - s for s in range(len(delta))]

    gpipe, expected_output, expected_gradient = run_pipeline(delta, "gpipe", m, recompute)
    assert [stage.peak_stored for stage in gpipe] == [m] * len(delta)
    # What each stage computed is the same, bit for bit: only the order differs between the schedules.
    assert torch.equal(output, expected_output)
    assert torch.equal(x_gradient, expected_gradient)
    expected = all_gradients(gpipe)
    for name, gradient in all_gradients(one_f_one_b).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputing_keeps_inputs_only_and_changes_no_gradient(schedule):
    kept, *_ = run_pipeline((1, 3), schedule, 3)
    recomputed, *_ = run_pipeline((1, 3), schedule, 3, recompute=True)
    expected = all_gradients(kept)
    for name, gradient in all_gradients(recomputed).items():
        assert torch.equal(gradient, expected[name]), name
    # Nothing of a finished step stays behind.
    assert all(not stage._inputs and not stage._outputs for stage in kept + recomputed)


def test_a_block_moves_with_its_weights_and_its_optimizer_state():
    config = OptimizerConfig(name="adamw", lr=0.01)
    stays, source, target = Stage(SPEC, config), Stage(SPEC, config), Stage(SPEC, config)
    stays.place(2)
    source.place(2, MovedBlock(stays.weights()[2]))

    def train(stage, step):
        y_BTD = stage.forward(STEP, step, torch.full((1, 3, 8), 0.1 * step), torch.ones(1, 3, dtype=torch.bool))
        stage.backward(STEP, step, y_BTD.detach(), torch.ones(1, 3, dtype=torch.bool))
        stage.apply(step, 1.0)

    for stage in (stays, source):
        train(stage, 1)
    target.place(2, source.take(2))
    assert not source.blocks
    for stage in (stays, target):
        train(stage, 2)
    for name, value in stays.weights()[2].items():
        assert torch.equal(value, target.weights()[2][name]), name


def test_a_step_that_is_given_up_leaves_neither_gradients_nor_activations():
    stage, x_BTD, mask_BT = Stage(SPEC, SGD), torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    stage.place(0)
    for i in range(2):
        stage.forward(STEP, i, x_BTD, mask_BT)
    stage.backward(STEP, 0, x_BTD, mask_BT)
    stage.discard()
    assert stage.gradient_norm_sq() == 0.0
    stage.peak_stored = 0
    stage.forward(STEP, 5, x_BTD, mask_BT, splits=True)
    assert stage.peak_stored == 1
    stage.discard()
    with pytest.raises(KeyError):
        stage.backward_weights(5)
    order = StepOrder(step=STEP, schedule="gpipe", sizes=[1, 1], mask_BT=mask_BT, width=8, num_slices=3, carried=2)
    assert [list(order.numbers(i)) for i in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert order.shapes() == [(3, 1, 8)] * 6 and order.shapes(last=True) == [(1, 1, 8)] * 6


def test_a_member_that_leaves_is_noticed_by_its_neighbour():
    ring = make_ring(2)
    receive = ring[0].receive((4,), 1, FORWARD, 0)
    waiting = Threads(receive.wait)
    ring[1].close()
    (error,) = waiting.join()
    assert isinstance(error, TransportError)
    assert "waiting for activations of micro-batch 0 from rank 1" in str(error)


def test_nothing_of_a_cluster_on_one_machine_can_be_reached_from_another():
    import psutil

    def listening():
        found = psutil.Process().net_connections(kind="tcp")
        return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}

    before = listening()
    store = open_store("127.0.0.1", 5.0)
    address = GroupAddress(host="127.0.0.1", port=store.port, generation=1, size=1, timeout_s=5.0)
    transport = GlooTransport(address, 0, store)
    opened = listening() - before
    transport.close()
    assert len(opened) >= 2  # the meeting point, and gloo
    assert {ip for ip, _ in opened} == {"127.0.0.1"}


def test_what_was_sent_is_with_the_neighbour_when_a_member_has_flushed():
    """Otherwise a stage goes on, or its process ends, with tensors that nobody has read."""
    first, second = make_ring(2)
    x_BTD = torch.ones(4, 64, 1024)

    def send_and_overwrite():
        first.send(x_BTD, 1, FORWARD, 0)
        first.flush()
        x_BTD.zero_()

    sender = Threads(send_and_overwrite)
    # Nobody has read it yet: whoever flushes waits.
    sender.threads[0].join(0.3)
    assert sender.threads[0].is_alive()
    received = second.receive((4, 64, 1024), 0, FORWARD, 0).wait()
    assert sender.join() == [None]
    assert torch.equal(received, torch.ones(4, 64, 1024)) and not x_BTD.any()
    for member in (first, second):
        member.close()


def test_a_flush_that_nobody_reads_ends_with_the_groups_timeout():
    ring = make_ring(2, timeout_s=0.3)
    ring[0].send(torch.ones(2**20), 1, FORWARD, 0)
    with pytest.raises(TransportError, match="sending"):
        ring[0].flush()
    for member in ring:
        member.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_has_flushed_what_it_sent_when_its_actions_are_done(schedule, monkeypatch):
    flushed, flush = [], GlooTransport.flush
    monkeypatch.setattr(GlooTransport, "flush", lambda self: (flush(self), flushed.append(self.rank)))
    run_pipeline((2, 2), schedule, m=3)
    assert sorted(flushed) == [0, 1, 2]
