"""The TEBs of a cluster on its devices: which move, which are put back, and from which copy."""

import threading
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.devices import block_moves, snapshots
from client_pipeline.runtime.devices.block_moves import BlockPlacement
from client_pipeline.runtime.devices.snapshots import Snapshots
from client_pipeline.runtime.stage.moved_block import MovedBlock
from helpers.recovery_cases import within
from helpers.scripted_ray import Reference


class Holder:
    """A device that takes what it is given: 10 bytes for a TEB from a device, 7 for one from a copy."""

    def __init__(self):
        self.held, self.asked = {}, []

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*arguments):
            self.asked.append((method, *arguments))
            return Reference(getattr(self, f"on_{method}")(*arguments))

        return SimpleNamespace(remote=remote)

    def on_take(self, index):
        return ("TEB", index, self.held.pop(index))

    def on_place(self, indices, version, *moved):
        self.held |= dict.fromkeys(indices, version)
        return [10] * len(moved)

    def on_settle(self, lineage):
        return dict(self.held)

    def on_put_back(self, keep, blocks, version, frozen, *copies):
        self.held = {index: self.held[index] for index in keep} | {index: version for index, _ in blocks}
        return [7] * len(blocks)

    def calls(self, method):
        return [entry[1:] for entry in self.asked if entry[0] == method]


class Pool:
    """Devices that answer at once."""

    name, runtime, placement = "cluster", SimpleNamespace(timeout=30.0), SimpleNamespace(spread=False)

    def __init__(self):
        self.devices, self.started = [Holder() for _ in range(3)], []

    def __getitem__(self, device):
        return self.devices[device]

    @property
    def held(self):
        return [device.held for device in self.devices]

    def start(self, devices, busy):
        self.started.append((devices, busy))

    def answers(self, references, activity):
        return {device: reference.value for device, reference in references.items()}

    def call(self, devices, call, activity):
        return self.answers({device: call(self.devices[device], device) for device in devices}, activity)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(snapshots, "ray", SimpleNamespace(wait=lambda *_, **__: None))
    pool = Pool()
    return BlockPlacement(pool, {f"blocks.{i}.base": torch.full((2,), float(i)) for i in range(4)}), pool


def segments(*blocks):
    """Segments of a plan with so many TEBs on each device."""
    order = tuple(device for device, count in enumerate(blocks) if count)
    return ClusterPlan(delta=blocks, order=order, m=1).segments()


def test_the_first_plan_has_every_device_build_its_own(cluster):
    placement, pool = cluster
    assert (placement.sure, placement.committed, placement.restored_bytes, placement.move_s) == (False, 0, 0, 0.0)
    assert placement.is_committed and placement.can_move
    placement.restore({3: moved(5.0)})
    placement.place(segments(1, 2, 1))
    assert placement.sure and placement.can_move and pool.held == [{0: 0}, {1: 0, 2: 0}, {3: 0}]
    assert pool.started == [([0, 1, 2], set())]
    [(keep, blocks, version, frozen, *copies)] = pool[1].calls("put_back")
    assert (keep, blocks, version, copies) == ([], [(1, -1), (2, -1)], 0, [])
    assert pool[2].calls("put_back")[0][1] == [(3, 0)]
    assert {i: float(tensors["base"][0]) for i, tensors in frozen.items()} == {1: 1.0, 2: 2.0}
    assert (placement.moved_blocks, placement.moved_bytes, placement.restored_bytes) == (0, 0, 28)


def test_a_plan_moves_the_tebs_that_change_owner_from_device_to_device(cluster, monkeypatch):
    placement, pool = cluster
    placement.place(segments(1, 2, 1))
    placement.stepped(6)
    assert not placement.is_committed and placement.can_move
    times = iter([10.0, 13.0, 13.0, 13.0])
    monkeypatch.setattr(block_moves, "time", SimpleNamespace(monotonic=lambda: next(times)))
    placement.place(segments(2, 0, 2))
    assert [sorted(tebs) for tebs in pool.held] == [[0, 1], [], [2, 3]] and pool[1].calls("take") == [(1,), (2,)]
    [(indices, version, moved)] = pool[0].calls("place")
    # The object itself does not come to the control unit.
    assert (indices, version, moved.value) == ([1], 6, ("TEB", 1, 0))
    assert [entry[0] for entry in pool[2].calls("place")] == [[2]] and len(pool[0].calls("settle")) == 1
    assert pool.started[-1] == ([0, 2], {0, 1, 2})
    placement.place(segments(2, 0, 2))
    assert (placement.moved_blocks, placement.moved_bytes, placement.move_s) == (2, 20, 3.0)
    assert placement.seconds_of_move(4) == 6.0


def test_a_device_that_joins_a_sure_placement_is_emptied_first(cluster):
    placement, pool = cluster
    placement.place(segments(2, 2, 0))
    placement.stepped(3)
    pool[2].held = {1: 1}
    placement.place(segments(2, 1, 1))
    assert pool.held[1:] == [{2: 0}, {3: 3}]
    assert [entry[:3] for entry in pool[2].calls("put_back")] == [([], [], 3)] and len(pool[2].calls("settle")) == 1
    placement.place(segments(2, 2, 0))
    placement.place(segments(2, 1, 1))
    assert len(pool[2].calls("settle")) == 1
    [(lineage,)] = pool[2].calls("settle")
    assert lineage == pool[0].calls("settle")[0][0] and len(lineage) == 32


def test_after_a_doubt_tebs_of_the_last_commit_stay_and_the_others_are_put_back(cluster):
    placement, pool = cluster
    placement.place(segments(1, 2, 1))
    assert placement.seconds_of_move(2) == 1.0
    placement.stepped(4)
    for device in pool.devices:
        device.held = dict.fromkeys(device.held, 4)
    placement.commit(segments(1, 2, 1), {k: Reference(f"copy of {k}") for k in range(3)}, 300 * 10**9)
    assert placement.committed == 4 and placement.is_committed
    assert placement.seconds_of_move(2) == 1.0 + 2 * 75e9 / 5e7
    placement.stepped(5)
    # The first has taken a step more, the last one has lost what it had.
    pool[0].held, pool[2].held = {0: 5}, {}
    placement.doubt()
    assert not placement.sure and not placement.can_move
    placement.place(segments(1, 2, 1))
    put_back = [device.calls("put_back")[1] for device in pool.devices]
    assert [entry[:3] for entry in put_back] == [([], [(0, 0)], 4), ([1, 2], [], 4), ([], [(3, 0)], 4)]
    assert [[copy.value for copy in entry[4:]] for entry in put_back] == [["copy of 0"], [], ["copy of 2"]]
    assert placement.restored_bytes == 28 + 14 and placement.is_committed
    # From here on TEBs move with the step that they are after again.
    placement.place(segments(2, 1, 1))
    assert pool[0].calls("place")[0][1] == 4


def moved(value):
    return MovedBlock({"w": torch.tensor([value])}, {"w/step": torch.tensor(2.0)})


def test_tebs_come_from_the_last_commit_or_a_checkpoint_or_are_new(monkeypatch):
    fetches, fetched = [], threading.Event()

    def wait(references, **options):
        fetches.append(([reference.value for reference in references], options))
        fetched.set()

    monkeypatch.setattr(snapshots, "ray", SimpleNamespace(wait=wait))
    made = Snapshots(12.0)
    assert (made.version, made.taken, made.bytes, made.fetch_s) == (0, 0, 0, 0.0)
    made.restore({1: moved(5.0), 3: moved(7.0)})
    assert made.sources([0, 1, 2, 3])[0] == [(0, -1), (1, 0), (2, -1), (3, 1)]
    made.commit({k: Reference(f"copy of {k}") for k in (2, 0)}, {0: [0, 1], 2: [2, 3]}, 9, 102)
    assert (made.version, made.taken, made.bytes) == (9, 1, 102)
    # Each copy comes here in the background, and is handed on once for all its TEBs.
    assert within(20.0, fetched.wait, 20.0)
    assert fetches == [(["copy of 2", "copy of 0"], {"num_returns": 2, "timeout": 12.0, "fetch_local": True})]
    places, copies = made.sources([3, 0, 2, 1, 4])
    assert places == [(3, 0), (0, 1), (2, 0), (1, 1), (4, -1)]
    assert [copy.value for copy in copies] == ["copy of 2", "copy of 0"] and made.sources([]) == ([], [])


def test_a_teb_travels_as_arrays_without_what_is_frozen():
    teb = MovedBlock({"w": torch.ones(2)}, {"w/step": torch.tensor(3.0)}, {"base": torch.zeros(4)})
    arrays = teb.as_arrays()
    assert [list(part) for part in arrays] == [["w"], ["w/step"]]
    back = MovedBlock.from_arrays(arrays)
    assert torch.equal(back.weights["w"], teb.weights["w"]) and float(back.optimizer["w/step"]) == 3.0
    assert back.frozen == {}
