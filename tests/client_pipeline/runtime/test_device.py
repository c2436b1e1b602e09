"""A device without Ray: the TEBs that it holds, its steps in a group, and what it forgets."""

from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices import device as device_module
from client_pipeline.runtime.devices.device import DeviceActor, StepReport
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import DoneAction, StepOrder
from client_pipeline.runtime.transport.faults import OutOfMemory
from helpers.recovery_cases import ADAMW, SPEC, initial

STEP = StepId(seed=0, round=1, step=1, cluster=0)
MASK_BT = torch.ones(4, 5, dtype=torch.bool)
ORDER = StepOrder(step=STEP, schedule="gpipe", sizes=[2, 2], mask_BT=MASK_BT, width=16)
WEIGHTS = initial()


@pytest.fixture
def make():
    threads = torch.get_num_threads()
    yield lambda **more: DeviceActor(SPEC, ADAMW, RuntimeConfig(threads=threads), **more)
    torch.set_num_threads(threads)


@pytest.fixture
def device(make):
    return make()


def moved(index):
    return MovedBlock(block_weights(WEIGHTS, index))


def holds(device, index):
    """Return true if a TEB is as it was drawn."""
    return all(torch.equal(value, WEIGHTS[f"blocks.{index}.{name}"]) for name, value in device.weights()[index].items())


def waiting(device):
    return any(bool(g.any()) for block in device.gradients().values() for g in block.values())


class Wire:
    """A group in which everything arrives at once, until it is closed."""

    def __init__(self, generation):
        self.rank, self.size, self.generation = 1, 2, generation
        self.sent, self.closed = [], False

    def receive(self, shape, peer, direction, micro_batch):
        return SimpleNamespace(wait=lambda: torch.randn(shape, generator=torch.Generator().manual_seed(micro_batch)))

    def send(self, tensor, peer, direction, micro_batch):
        self.sent.append((peer, direction, micro_batch))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def connected(device, monkeypatch, *blocks):
    monkeypatch.setattr(device_module, "join_group", lambda address, rank: Wire(address))
    device.place(list(blocks), 0, *(moved(index) for index in blocks))
    device.connect(3, 1)
    return device.transport


def test_tebs_come_and_go_with_their_steps_and_bytes(device):
    brought = moved(2)
    assert device.place([1, 2], 4, None, brought) == [0, brought.nbytes]
    status = device.status()
    assert (status["blocks"], status["accelerator"]) == ([1, 2], "cpu") and status["pid"] > 0
    assert holds(device, 2) and not holds(device, 1)
    assert device.settle("one") == {}
    device.place([1, 2], 4, None, brought)
    assert device.settle("one") == {1: 4, 2: 4}
    assert device.take(2).weights.keys() == brought.weights.keys() and device.status()["blocks"] == [1]
    device.load({1: block_weights(WEIGHTS, 1)})
    assert holds(device, 1) and device.settle("one") == {1: 4}
    # Another control unit of the cluster counts the same steps, of other weights.
    assert device.settle("another") == {}
    with pytest.raises(KeyError):
        device.take(9)
    assert not device.watch.busy


def test_a_step_is_taken_at_once_or_when_it_is_applied_or_forgotten(device, monkeypatch):
    wire = connected(device, monkeypatch, 1, 2)
    report, copies = device.run(ORDER, None, copies=True)
    assert copies == {} and not report.copied_bytes and report.norm_sq > 0
    assert sorted(wire.sent) == [(0, direction, i) for direction in (0, 1) for i in (0, 1)]
    assert [action.kind for action in report.actions] == ["F", "F", "B", "B"]
    # Two TEBs, 4 examples of 5 positions.
    assert report.work == 40.0 and waiting(device) and holds(device, 1)
    device.discard()
    assert not waiting(device) and device.apply(1, 1.0) == (0, {})
    report, copies = device.run(ORDER, 2, copies=True)
    assert not holds(device, 1) and sorted(copies) == [1, 2] and device.run(ORDER, None)[1] == {}
    sizes = [array.nbytes for parts in copies.values() for part in parts for array in part.values()]
    assert report.copied_bytes == sum(sizes) > 0
    size, copies = device.apply(3, 0.5, copies=True)
    assert size == sum(sizes) and sorted(copies) == [1, 2]
    assert {block.version for block in device.stage.blocks.values()} == {3}
    held = device.memory()
    assert held["held_bytes"] > 0 and 0 < held["idle_bytes"] <= held["peak_bytes"]
    actions = [DoneAction("F", 0, 10.0, 12.0), DoneAction("B", 0, 20.0, 20.5)]
    report = StepReport(actions=actions, norm_sq=0.0)
    assert (report.busy_s, report.work, report.copied_bytes) == (2.5, 0.0, 0)
    device.close()
    assert wire.closed and device.status()["blocks"] == [] and device.transport is None


@pytest.mark.parametrize(("generation", "closed"), [(2, False), (3, True), (4, True)])
def test_a_group_is_left_before_another_is_joined_and_by_no_late_interruption(device, monkeypatch, generation, closed):
    wire = connected(device, monkeypatch, 1)
    device.interrupt(generation)
    assert wire.closed == closed
    device.connect(5, 1)
    second = device.transport
    assert wire.closed and not second.closed and second.generation == 5
    device.settle("")
    assert second.closed and device.transport is None
    device.disconnect()
    device.interrupt(generation)


@pytest.mark.parametrize(("limit", "can_limit"), [(30e6, True), (30e6, False), (0.0, True)])
def test_a_device_that_its_limit_stops_names_its_memory(make, monkeypatch, limit, can_limit):
    reserve, private = [], iter([10e6, 24e6])
    monkeypatch.setattr(device_module, "return_freed_memory", lambda: None)
    monkeypatch.setattr(device_module, "limit_private_memory", lambda limit: can_limit)
    monkeypatch.setattr(device_module, "private_bytes", lambda: int(next(private)))
    monkeypatch.setattr(device_module, "use_reserve", reserve.append)
    device = make(memory_limit=limit) if limit else make()
    can_limit = bool(limit) and can_limit
    monkeypatch.setattr(device.stage, "place", lambda *_: bytearray(2**62))
    with pytest.raises(OutOfMemory if can_limit else MemoryError) as error:
        device.place([1], 0, None)
    assert reserve == [True] * can_limit
    if can_limit:
        assert "more than its 30 MB" in str(error.value) and "holds 0 MB for 0 TEBs and takes 14 MB" in str(error.value)
    device.settle("")
    assert reserve == [True, False][: 2 * can_limit]
