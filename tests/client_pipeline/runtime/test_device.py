"""A device without Ray: what it holds, and what it forgets."""

from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.runtime import device as device_module
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.device import DeviceActor, StepReport
from client_pipeline.runtime.faults import NotFinite
from client_pipeline.runtime.moved_block import MovedBlock
from client_pipeline.runtime.stage import DoneAction, StepOrder
from helpers.recovery_cases import ADAMW, SPEC, initial

STEP = StepId(seed=0, round=1, step=1, cluster=0)
MASK_BT = torch.ones(4, 5, dtype=torch.bool)
ORDER = StepOrder(step=STEP, schedule="gpipe", sizes=[2, 2], mask_BT=MASK_BT, width=16)


@pytest.fixture
def device():
    threads = torch.get_num_threads()
    yield DeviceActor(SPEC, ADAMW, RuntimeConfig(threads=threads))
    torch.set_num_threads(threads)


def arrays(*indices):
    weights = initial()
    return {index: MovedBlock(block_weights(weights, index)).as_arrays() for index in indices}


def weight(device, index):
    return next(iter(device.weights()[index].values()))


class Wire:
    """A group in which something arrives at once, until it is closed."""

    def __init__(self, generation=3):
        self.rank, self.size, self.generation = 1, 2, generation
        self.sent = []
        self.closed = False

    def receive(self, shape, peer, direction, micro_batch):
        generator = torch.Generator().manual_seed(micro_batch)
        return SimpleNamespace(wait=lambda: torch.randn(shape, generator=generator))

    def send(self, tensor, peer, direction, micro_batch):
        self.sent.append((peer, direction, micro_batch))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def connected(device, monkeypatch, *blocks):
    monkeypatch.setattr(device_module, "join_group", lambda address, rank: Wire(address))
    device.place(list(blocks), 0, *(None for _ in blocks))
    device.connect(3, 1)
    return device.transport


def test_a_device_says_what_it_holds_and_what_it_was_brought(device):
    weights = initial()
    brought = MovedBlock(block_weights(weights, 2))
    assert device.place([1, 2], 4, None, brought) == [0, brought.nbytes]
    assert device.status()["blocks"] == [1, 2]
    assert device.settle("") == {1: 4, 2: 4}
    for name, value in device.weights()[2].items():
        assert torch.equal(value, brought.weights[name])
    taken = device.take(2)
    assert taken.weights.keys() == brought.weights.keys() and device.status()["blocks"] == [1]


def test_what_another_control_unit_has_placed_is_dropped(device):
    device.settle("one")
    device.place([1], 4, None)
    assert device.settle("one") == {1: 4}
    assert device.settle("another") == {}
    device.place([2], 1, None)
    assert device.settle("another") == {2: 1}


def test_a_device_holds_what_it_is_to_keep_and_what_copies_bring_and_nothing_else(device):
    device.place([0, 1], 4, None, None)
    kept, copies = weight(device, 0).clone(), arrays(2, 3)
    sizes = device.put_back([0], [(2, 0), (3, 1), (1, -1)], 7, {1: {}, 2: {}, 3: {}}, copies, arrays(3))
    assert device.status()["blocks"] == [0, 1, 2, 3]
    assert device.settle("") == {0: 4, 1: 7, 2: 7, 3: 7}
    assert torch.equal(weight(device, 0), kept)
    expected = block_weights(initial(), 2)
    assert all(torch.equal(value, expected[name]) for name, value in device.weights()[2].items())
    assert sizes == [sum(v.nbytes for v in expected.values())] * 2 + [0]
    device.put_back([2], [], 7, {})
    assert device.status()["blocks"] == [2]


def test_a_copy_is_arrays_of_all_tebs_and_their_bytes(device):
    device.place([0, 3], 0, *(MovedBlock(block_weights(initial(), index)) for index in (0, 3)))
    assert device.apply(1, 1.0, copies=False) == (0, {})
    size, copies = device.apply(2, 1.0, copies=True)
    assert sorted(copies) == [0, 3]
    assert size == sum(array.nbytes for parts in copies.values() for part in parts for array in part.values()) > 0
    assert device.settle("") == {0: 2, 3: 2}


def test_memory_is_told_from_before_the_device_had_anything(device):
    found = device.memory()
    assert 0 < found["idle_bytes"] <= found["peak_bytes"]


def test_a_step_is_run_in_the_group_and_its_work_is_told(device, monkeypatch):
    wire = connected(device, monkeypatch, 1, 2)
    report, copies = device.run(ORDER, None, copies=True)
    assert copies == {} and not report.copied_bytes
    assert sorted(wire.sent) == [(0, direction, i) for direction in (0, 1) for i in (0, 1)]
    assert [action.kind for action in report.actions] == ["F", "F", "B", "B"]
    assert report.norm_sq > 0 and report.busy_s > 0
    # Two TEBs, 4 examples of 5 positions.
    assert report.work == 40.0
    # Nobody has taken the step.
    assert device.settle("") == {1: 0, 2: 0}


def test_an_optimizer_step_is_taken_at_once_or_when_it_is_told_and_may_be_forgotten(device, monkeypatch):
    connected(device, monkeypatch, 1)
    before = weight(device, 1).clone()
    device.run(ORDER, None)
    assert any(bool(g.any()) for g in device.gradients()[1].values())
    device.discard()
    assert not any(bool(g.any()) for g in device.gradients()[1].values())
    device.run(ORDER, 1)
    once = weight(device, 1).clone()
    assert not torch.equal(once, before)
    device.run(ORDER, None)
    assert torch.equal(weight(device, 1), once)
    device.apply(2, 0.5)
    assert not torch.equal(weight(device, 1), once)
    assert device.settle("") == {1: 2}


def test_loaded_weights_take_the_place_of_those_that_were_there(device):
    device.place([0], 5, None)
    weights = block_weights(initial(), 0)
    device.load({0: weights})
    assert all(torch.equal(value, weights[name]) for name, value in device.weights()[0].items())
    assert device.settle("") == {0: 5}


def test_a_device_in_no_group_says_what_is_missing(device):
    with pytest.raises(RuntimeError, match="the device is in no group; connect it first"):
        device.run(ORDER, None)


def test_a_step_that_fails_leaves_the_group_and_no_gradient(device, monkeypatch):
    wire = connected(device, monkeypatch, 1)

    def gone():
        raise RuntimeError("the neighbour is gone")

    posted = wire.receive
    monkeypatch.setattr(
        wire,
        "receive",
        lambda shape, peer, direction, i: (
            SimpleNamespace(wait=gone) if (direction, i) == (1, 1) else posted(shape, peer, direction, i)
        ),
    )
    with pytest.raises(RuntimeError, match="the neighbour is gone"):
        device.run(ORDER, 1)
    assert wire.closed and device.transport is None
    assert not any(bool(g.any()) for g in device.gradients()[1].values())
    assert device.settle("") == {1: 0}


def test_gradients_that_are_not_finite_name_their_tebs_and_none_is_taken(device, monkeypatch):
    connected(device, monkeypatch, 1, 2)
    with torch.no_grad():
        next(iter(device.stage.blocks[2].parameters.values())).fill_(float("nan"))
    before = weight(device, 1).clone()
    with pytest.raises(NotFinite, match=r"the gradients of TEBs \[1, 2\] hold NaN or Inf"):
        device.run(ORDER, 1)
    assert torch.equal(weight(device, 1), before) and device.settle("")[1] == 0
    assert not any(bool(g.any()) for g in device.gradients()[1].values())


def test_a_group_is_left_once_and_before_another_is_joined(device, monkeypatch):
    first = connected(device, monkeypatch, 1)
    device.connect(4, 1)
    assert first.closed and not device.transport.closed
    second = device.transport
    device.settle("")
    assert second.closed and device.transport is None
    device.disconnect()


@pytest.mark.parametrize(("generation", "closed"), [(2, False), (3, True), (4, True)])
def test_an_interruption_that_comes_late_does_not_touch_a_later_group(device, monkeypatch, generation, closed):
    wire = connected(device, monkeypatch, 1)
    device.interrupt(generation)
    assert wire.closed == closed
    device.disconnect()
    device.interrupt(generation)


def test_busy_seconds_are_those_of_the_actions_without_the_waits():
    actions = [DoneAction("F", 0, 10.0, 12.0), DoneAction("B", 0, 20.0, 20.5)]
    assert StepReport(actions=actions, norm_sq=0.0).busy_s == 2.5


def test_a_call_that_fails_is_over_too(device):
    with pytest.raises(KeyError):
        device.take(9)
    assert not device.watch.busy
