"""Placement of the TEBs on the devices: moves with the plan, commits, and restores after a fault.

Every event after which the placement is uncertain calls :meth:`BlockPlacement.doubt`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import Segment
from client_pipeline.runtime.devices.device_pool import DevicePool
from client_pipeline.runtime.devices.snapshots import Snapshots
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.transport.faults import PipelineError
from client_pipeline.weights.base_weights import BaseWeights, FrozenBase, cut_part

FIRST_MOVE_S, FIRST_BYTES_S = 1.0, 5e7
"""Cost of a move before any was seen: seconds, and bytes in a second."""


class BlockPlacement:
    """The TEBs of one cluster on its devices.

    Without a fault, a TEB that changes owner goes from device to device. After a fault every device reports its TEBs
    and their optimizer step; a TEB that differs from the last commit is put back from its copy.

    Parameters
    ----------
    pool : the devices
    frozen : what adapters are added to, by global name
    """

    def __init__(self, pool: DevicePool, frozen: Mapping[str, Tensor]) -> None:
        self.snapshots = Snapshots(pool.runtime.timeout)
        """Copies of all TEBs as of the last commit."""
        self.moved_blocks = 0
        """TEBs that changed owner since the pipeline began, first placements and repairs left out."""
        self.moved_bytes = 0
        """Bytes of their weights and optimizer state."""
        self.move_s = 0.0
        """Time that these moves took [s]."""
        self.restored_bytes = 0
        """Bytes that were put back after faults."""
        self._owner: dict[int, int] = {}
        self.sure = False
        """True if every TEB is where the last plan put it, after the same step as all others."""
        self._version = 0
        """Optimizer step that the TEBs are after."""
        self._pool = pool
        self._frozen = frozen
        self._lacking: set[int] = set()
        """Devices whose machines have not the files of the frozen weights."""
        self._asked: set[int] = set()
        """Devices that hold what they were given, and nothing else, since the last time that nothing was sure."""
        # Two control units of a cluster, one after the other, count steps alike and mean other weights.
        self._lineage = uuid.uuid4().hex

    @property
    def committed(self) -> int:
        """Optimizer step of the last commit; 0 before the first."""
        return self.snapshots.version

    @property
    def is_committed(self) -> bool:
        """True if the TEBs can be put back to their present state."""
        return self._version == self.snapshots.version

    @property
    def can_move(self) -> bool:
        """True if another plan keeps the step that the TEBs are after."""
        return self.is_committed or (self.sure and not self._lacking)

    def doubt(self) -> None:
        """Note a reason not to be sure any more: the next plan asks the devices what they hold."""
        self.sure = False

    def stepped(self, version: int) -> None:
        """Note that all TEBs have taken optimizer step ``version``."""
        self._version = version

    def restore(self, states: Mapping[int, MovedBlock]) -> None:
        """Give TEBs that no device holds yet the weights and optimizer state of a checkpoint, when they are placed."""
        self.snapshots.restore(states)

    def commit(self, segments: list[Segment], copies: Mapping[int, Any], num_bytes: int) -> None:
        """From here on TEBs are put back to the step that they have taken last.

        Parameters
        ----------
        segments : TEBs of each device
        copies : Ray's reference of each device's copies after that step
        num_bytes : of all copies
        """
        blocks = {segment.device: list(segment.blocks) for segment in segments}
        self.snapshots.commit(copies, blocks, self._version, num_bytes)

    def committed_blocks(self) -> dict[int, MovedBlock]:
        """All TEBs as of the last commit, in memory of their own.

        Raises
        ------
        PipelineError
            If the machine is gone that a copy was on, before it had come here.
        """
        copies = self._pool.answers(self.snapshots.by_device, "collecting the TEBs' copies")
        arrays = {index: block for blocks in copies.values() for index, block in blocks.items()}
        return {index: MovedBlock.from_arrays(arrays[index]) for index in sorted(arrays)}

    def place(self, segments: list[Segment]) -> None:
        """Place the segments of a plan on the devices, and start the devices that are needed."""
        owners = {index: segment.device for segment in segments for index in segment.blocks}
        self._pool.start([segment.device for segment in segments], set(self._owner.values()))
        is_sure, self.sure = self.sure, False
        # A TEB that goes to a device without its files, or comes from one, is put there with them.
        if is_sure and not self._lacking and self._files_are_on(sorted(set(owners.values()) - self._asked)):
            # A failure here must not leave a wrong owner.
            self._move(owners)
        elif is_sure and not self.is_committed:
            raise PipelineError(f"{self._pool.name}: no TEB moves in a round to a machine without its files")
        else:
            self._put_back(owners)
        self._owner, self.sure = owners, True

    def _frozen_on(self, needed: Mapping[int, list[int]]) -> dict[int, dict[int, Mapping[str, Tensor]]]:
        """Return the frozen weights of TEBs with adapters, by device and TEB; devices receive the files that they lack.

        TEBs are cut one after the other, so that memory holds one at a time.
        """

        def frozen_of(index: int) -> Mapping[str, Tensor]:
            if isinstance(self._frozen, FrozenBase):
                return self._frozen.part(f"blocks.{index}.")
            return block_weights(self._frozen, index)

        frozen = {device: {index: frozen_of(index) for index in indices} for device, indices in needed.items()}
        if not self._pool.placement.spread or not isinstance(self._frozen, BaseWeights):
            return frozen
        self._lacking = {device for device in needed if not self._has_files(device, self._frozen.part("-"))}
        for device in sorted(self._lacking):
            for index in needed[device]:
                part = cut_part(self._frozen.part(f"blocks.{index}."))
                if not self._has_files(device, part.base):
                    reference = self._pool[device].keep_part.remote(part.content)
                    self._pool.answers({device: reference}, "giving frozen weights to a device")
                frozen[device][index] = part.base
        return frozen

    def _files_are_on(self, devices: list[int]) -> bool:
        """Return true if all devices have the files of the frozen weights, or need none."""
        if not self._pool.placement.spread or not isinstance(self._frozen, BaseWeights):
            return True
        return all(self._has_files(device, self._frozen.part("-")) for device in devices)

    def _has_files(self, device: int, base: BaseWeights) -> bool:
        reference = self._pool[device].has_files.remote(base)
        return bool(self._pool.answers({device: reference}, "looking for the model's files")[device])

    def _move(self, owners: Mapping[int, int]) -> None:
        self._empty({device for index, device in owners.items() if self._owner[index] != device} - self._asked)
        begun, arriving = time.monotonic(), dict[int, list[tuple[int, Any]]]()
        for index, device in sorted(owners.items()):
            owner = self._owner[index]
            if owner != device:
                # The object goes from device to device; the control unit holds a reference only.
                arriving.setdefault(device, []).append((index, self._pool[owner].take.remote(index)))
        references = {
            device: self._pool[device].place.remote(
                [i for i, _ in blocks], self._version, *(moved for _, moved in blocks)
            )
            for device, blocks in arriving.items()
        }
        brought = self._pool.answers(references, "placing TEBs")
        self.moved_blocks += sum(map(len, arriving.values()))
        self.moved_bytes += sum(sum(sizes) for sizes in brought.values())
        self.move_s += time.monotonic() - begun

    def _empty(self, devices: set[int]) -> None:
        """Empty devices that no plan has used since the placement was last sure."""
        for device in sorted(devices):
            self._pool.call([device], lambda actor, _: actor.settle.remote(self._lineage), "settling")
            self._pool.call([device], lambda actor, _: actor.put_back.remote([], [], self._version, {}), "settling")
        self._asked |= devices

    def seconds_of_move(self, num_blocks: int) -> float:
        """Estimate the time in which so many TEBs change owner, from earlier moves or from their copies' bytes [s]."""
        if self.moved_blocks:
            return num_blocks * self.move_s / self.moved_blocks
        size = self.snapshots.bytes / max(self.snapshots.taken * len(self._owner), 1)
        return FIRST_MOVE_S + num_blocks * size / FIRST_BYTES_S

    def _put_back(self, owners: Mapping[int, int]) -> None:
        version = self.snapshots.version
        devices = sorted(set(owners.values()))
        held_blocks = self._pool.call(devices, lambda actor, _: actor.settle.remote(self._lineage), "settling")
        assigned = {device: sorted(index for index, owner in owners.items() if owner == device) for device in devices}
        kept = {
            device: [index for index in indices if held_blocks[device].get(index) == version]
            for device, indices in assigned.items()
        }
        frozen = self._frozen_on({device: sorted({*assigned[device]} - {*kept[device]}) for device in devices})
        references = {}
        for device in devices:
            blocks, copies = self.snapshots.sources(frozen[device])
            references[device] = self._pool[device].put_back.remote(
                kept[device], blocks, version, frozen[device], *copies
            )
        brought = self._pool.answers(references, "putting TEBs back")
        self.restored_bytes += sum(sum(sizes) for sizes in brought.values())
        self._version, self._asked = version, set(devices)
