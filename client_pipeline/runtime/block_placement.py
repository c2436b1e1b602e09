"""Which device holds which TEB: moves with the plan, and putting TEBs back after a fault."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import Segment
from client_pipeline.runtime.device_pool import DevicePool
from client_pipeline.runtime.snapshots import Snapshots


class BlockPlacement:
    """The TEBs of one cluster on its devices.

    While all is well a TEB that changes owner goes from device to device. After a fault nothing is sure: then every
    device says what it holds and after which step, and what is not as the last snapshot has it is put back from there.

    Parameters
    ----------
    pool : the devices
    snapshots : the last copies
    frozen : what adapters are added to, by global name
    """

    def __init__(self, pool: DevicePool, snapshots: Snapshots, frozen: Mapping[str, Tensor]) -> None:
        self.moved_blocks = 0
        """TEBs that changed owner since the pipeline began, first placements and repairs left out."""
        self.moved_bytes = 0
        """Bytes of their weights and optimizer state."""
        self.restored_bytes = 0
        """Bytes that were put back after faults."""
        self.owner: dict[int, int] = {}
        self.sure = False
        """Whether every TEB is where ``owner`` says, after the same step as all others."""
        self.version = 0
        """Optimizer step that the TEBs are after."""
        self._pool = pool
        self._snapshots = snapshots
        self._frozen = frozen
        # Two control units of a cluster, one after the other, count steps alike and mean other weights.
        self._lineage = uuid.uuid4().hex

    def place(self, segments: list[Segment]) -> None:
        """Have the devices hold the segments of a plan, and start those that are needed."""
        wanted = {index: segment.device for segment in segments for index in segment.blocks}
        holding = set(self.owner.values()) if self.sure else set()
        self._pool.start([segment.device for segment in segments], holding)
        if self.sure:
            # A failure here must not leave a wrong owner.
            self.sure = False
            self._move(wanted)
        else:
            self._put_back(wanted)
        self.owner, self.sure = wanted, True

    def _move(self, wanted: Mapping[int, int]) -> None:
        arriving: dict[int, list[tuple[int, Any]]] = {}
        for index, device in sorted(wanted.items()):
            owner = self.owner[index]
            if owner != device:
                # The object goes from device to device; the control unit holds a reference only.
                arriving.setdefault(device, []).append((index, self._pool[owner].take.remote(index)))
        placed = {
            device: self._pool[device].place.remote(
                [i for i, _ in blocks], self.version, *(moved for _, moved in blocks)
            )
            for device, blocks in arriving.items()
        }
        brought = self._pool.answers(placed, "placing TEBs")
        self.moved_blocks += sum(map(len, arriving.values()))
        self.moved_bytes += sum(sum(sizes) for sizes in brought.values())

    def _put_back(self, wanted: Mapping[int, int]) -> None:
        version = self._snapshots.version
        devices = sorted(set(wanted.values()))
        held = self._pool.call(devices, lambda actor, _: actor.settle.remote(self._lineage), "settling")
        placed = {}
        for device in devices:
            own = sorted(index for index, owner in wanted.items() if owner == device)
            keep = [index for index in own if held[device].get(index) == version]
            blocks, copies = self._snapshots.sources(index for index in own if index not in keep)
            frozen = {index: block_weights(self._frozen, index) for index, _ in blocks}
            placed[device] = self._pool[device].put_back.remote(keep, blocks, version, frozen, *copies)
        brought = self._pool.answers(placed, "putting TEBs back")
        self.restored_bytes += sum(sum(sizes) for sizes in brought.values())
        self.version = version
