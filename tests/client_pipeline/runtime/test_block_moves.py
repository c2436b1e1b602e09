"""Which device holds which TEB: what moves, what is put back, and from which copy."""

import threading

import pytest
import torch

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime import device_pool, frozen_devices, snapshots
from client_pipeline.runtime.block_moves import BlockPlacement
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.device_pool import DevicePool
from client_pipeline.runtime.faults import DeviceFault
from client_pipeline.runtime.moved_block import MovedBlock
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.snapshots import Snapshots
from helpers.recovery_cases import SPEC, within
from helpers.scripted_ray import Reference, ScriptedActor, ScriptedRay, ended


class Holder(ScriptedActor):
    """A device that says which TEBs it holds, and takes what it is given: 10 bytes for each."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.held = {}
        self.called = {"take": self._take, "place": self._place, "settle": self._settle, "put_back": self._put_back}

    def __getattr__(self, method):
        actor = super().__getattr__(method)
        if method in self.called:
            plain = actor.remote

            def remote(*arguments):
                plain(*arguments)
                value = self.called[method](*arguments)
                return Reference(self.answers.get(method, value))

            actor.remote = remote
        return actor

    def _take(self, index):
        return ("TEB", index, self.held.pop(index))

    def _place(self, indices, version, *moved):
        self.held |= dict.fromkeys(indices, version)
        return [10] * len(moved)

    def _settle(self, lineage):
        return dict(self.held)

    def _put_back(self, keep, blocks, version, frozen, *copies):
        self.held = {index: self.held[index] for index in keep} | {index: version for index, _ in blocks}
        return [7] * len(blocks)

    def said(self, method):
        return [entry[1:] for entry in self.asked if entry[0] == method]


@pytest.fixture
def cluster(monkeypatch):
    """Placement over three devices."""
    ray = ScriptedRay()
    for module in (device_pool, frozen_devices):
        monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(snapshots, "ray", ray)
    devices = [Holder(k) for k in range(3)]
    monkeypatch.setattr(DevicePool, "_make", lambda self, device: devices[device])
    pool = DevicePool("cluster", SPEC, OptimizerConfig(name="sgd"), RuntimeConfig(timeout=30.0), Placement())
    frozen = {f"blocks.{i}.base": torch.full((2,), float(i)) for i in range(4)}
    return BlockPlacement(pool, frozen), devices


def segments(*blocks):
    """Segments of a plan with so many TEBs on each device."""
    order = tuple(device for device, count in enumerate(blocks) if count)
    return ClusterPlan(delta=blocks, order=order, m=1).segments()


def held(devices):
    return [dict(device.held) for device in devices]


def test_the_first_plan_has_every_device_build_its_own(cluster):
    placement, devices = cluster
    assert not placement.sure and placement.committed == 0
    placement.place(segments(1, 2, 1))
    assert placement.sure
    assert held(devices) == [{0: 0}, {1: 0, 2: 0}, {3: 0}]
    [(keep, blocks, version, frozen, *copies)] = devices[1].said("put_back")
    assert (keep, blocks, version, copies) == ([], [(1, -1), (2, -1)], 0, [])
    assert {i: float(tensors["base"][0]) for i, tensors in frozen.items()} == {1: 1.0, 2: 2.0}
    # That is no move: each device has made 7 bytes for each TEB.
    assert (placement.moved_blocks, placement.moved_bytes, placement.restored_bytes) == (0, 0, 28)


def test_a_plan_moves_the_tebs_that_change_owner_from_device_to_device(cluster):
    placement, devices = cluster
    placement.place(segments(1, 2, 1))
    placement.stepped(6)
    for device in devices:
        device.asked.clear()
    placement.place(segments(2, 0, 2))
    assert [sorted(found) for found in held(devices)] == [[0, 1], [], [2, 3]]
    assert devices[1].said("take") == [(1,), (2,)]
    # With the step that all of them are after; the object itself does not come here.
    [(indices, version, moved)] = devices[0].said("place")
    assert (indices, version, moved.value) == ([1], 6, ("TEB", 1, 0))
    assert [entry[0] for entry in devices[2].said("place")] == [[2]]
    assert devices[0].said("settle") == []
    assert (placement.moved_blocks, placement.moved_bytes) == (2, 20)
    placement.place(segments(2, 0, 2))
    assert (placement.moved_blocks, placement.moved_bytes) == (2, 20)


def test_a_move_that_fails_leaves_nothing_sure_and_the_next_plan_asks(cluster):
    placement, devices = cluster
    placement.place(segments(1, 2, 1))
    devices[0].answers["place"] = ended()
    with pytest.raises(DeviceFault):
        placement.place(segments(2, 1, 1))
    assert not placement.sure
    del devices[0].answers["place"]
    placement.place(segments(2, 1, 1))
    assert placement.sure and len(devices[0].said("settle")) == 2
    assert placement.moved_blocks == 0


def test_after_a_doubt_what_is_after_the_last_commit_stays_and_the_rest_is_put_back(cluster):
    placement, devices = cluster
    placement.place(segments(1, 2, 1))
    placement.stepped(4)
    for device in devices:
        device.held = dict.fromkeys(device.held, 4)
    placement.commit(segments(1, 2, 1), {k: Reference(f"copy of {k}") for k in range(3)}, 300)
    assert placement.committed == 4
    placement.stepped(5)
    # The first has taken a step more, the last one has lost what it had.
    devices[0].held, devices[2].held = {0: 5}, {}
    placement.doubt()
    assert not placement.sure
    before = placement.restored_bytes
    for device in devices:
        device.asked.clear()
    placement.place(segments(1, 2, 1))
    found = [device.said("put_back")[0] for device in devices]
    copies = [[copy.value for copy in entry[4:]] for entry in found]
    assert [(entry[0], entry[1], entry[2]) for entry in found] == [
        ([], [(0, 0)], 4),
        ([1, 2], [], 4),
        ([], [(3, 0)], 4),
    ]
    assert copies == [["copy of 0"], [], ["copy of 2"]]
    assert {device: copies.value for device, copies in placement.snapshots.by_device.items()} == {
        k: f"copy of {k}" for k in range(3)
    }
    assert placement.restored_bytes - before == 14
    # All devices say it to the same control unit, and another one has another name.
    [lineage] = {entry for device in devices for entry in device.said("settle")}
    assert lineage != (cluster_lineage(),) and len(lineage[0]) == 32
    # From here on TEBs move with the step that they are after again.
    placement.place(segments(2, 1, 1))
    assert devices[0].said("place")[0][1] == 4


def cluster_lineage():
    return BlockPlacement(DevicePool("x", SPEC, OptimizerConfig(name="sgd"), RuntimeConfig(), Placement()), {})._lineage


def test_idle_devices_alone_may_have_ended_themselves(cluster):
    placement, devices = cluster
    placement.place(segments(2, 2, 0))
    placement.place(segments(2, 0, 2))
    for device in devices:
        device.asked.clear()
    # Who holds something is not asked whether it is there.
    placement.place(segments(1, 2, 1))
    assert [device.said("alive") for device in devices] == [[], [()], []]


class Fetched(ScriptedRay):
    """Says when copies are fetched."""

    def __init__(self):
        super().__init__()
        self.fetched = threading.Event()
        self.fetches = []

    def wait(self, references, num_returns=1, timeout=None, fetch_local=True):
        self.fetches.append(([r.value for r in references], num_returns, timeout, fetch_local))
        self.fetched.set()
        return references, []


def copied(monkeypatch, ray=None):
    monkeypatch.setattr(snapshots, "ray", ray or Fetched())
    made = Snapshots(12.0)
    made.commit({k: Reference(f"copy of {k}") for k in (0, 2)}, {0: [0, 1], 2: [2, 3]}, 9, 102)
    return made


def moved(value):
    return MovedBlock({"w": torch.tensor([value])}, {"w/step": torch.tensor(2.0)})


def test_a_copy_of_every_device_is_counted_and_fetched_in_the_background(monkeypatch):
    ray = Fetched()
    made = copied(monkeypatch, ray)
    assert (made.version, made.taken, made.bytes) == (9, 1, 102)
    assert within(20.0, ray.fetched.wait, 20.0)
    assert ray.fetches == [(["copy of 0", "copy of 2"], 2, 12.0, True)]
    assert {device: copies.value for device, copies in made.by_device.items()} == {0: "copy of 0", 2: "copy of 2"}
    made.commit({1: Reference("copy of 1")}, {1: [0, 1, 2, 3]}, 10, 100)
    assert (made.version, made.taken, made.bytes) == (10, 2, 202)
    assert {device: copies.value for device, copies in made.by_device.items()} == {1: "copy of 1"}


def test_each_copy_is_handed_on_once_for_all_its_tebs(monkeypatch):
    made = copied(monkeypatch)
    places, copies = made.sources([3, 0, 2, 1])
    assert places == [(3, 0), (0, 1), (2, 0), (1, 1)]
    assert [copy.value for copy in copies] == ["copy of 2", "copy of 0"]
    assert made.sources([]) == ([], [])


def test_a_teb_without_a_copy_comes_from_the_checkpoint_or_is_new(monkeypatch):
    made = Snapshots(12.0)
    made.restore({1: moved(5.0), 3: moved(7.0)})
    places, copies = made.sources([0, 1, 2, 3])
    assert places == [(0, -1), (1, 0), (2, -1), (3, 1)]
    assert [float(MovedBlock.from_arrays(copies[k][i]).weights["w"]) for k, i in enumerate((1, 3))] == [5.0, 7.0]


def test_the_first_commit_takes_the_place_of_the_checkpoint(monkeypatch):
    monkeypatch.setattr(snapshots, "ray", Fetched())
    made = Snapshots(12.0)
    made.restore({0: moved(5.0), 4: moved(6.0)})
    made.commit({0: Reference("copy")}, {0: [0]}, 1, 1)
    places, [copy] = made.sources([0, 4])
    assert places == [(0, 0), (4, -1)] and copy.value == "copy"
