"""Trials of the devices without a TEB, which show changes of their speed while the others train.

The time of a trial may differ from that in a pipeline: only its change from round to round counts. Only devices on
machines of their own try. Elsewhere a trial would slow down the devices that train.
"""

from __future__ import annotations

from typing import Any

import ray
from torch import Tensor

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.runtime.control_unit.round_report import medians
from client_pipeline.runtime.devices.device_pool import DevicePool


class SpareDevices:
    """One trial a round of each device without a TEB; the round waits for none, and ignores failed ones.

    Parameters
    ----------
    pool : the cluster's devices
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._answers: dict[int, Any] = {}
        """References of answers that were not read yet, by device."""
        self._mask_BT: Tensor | None = None

    def ask(self, plan: ClusterPlan, mask_BT: Tensor) -> None:
        """Start the trials, always of the first micro-batch seen, so that times differ by the device alone.

        Parameters
        ----------
        plan : the others'
        mask_BT : padding mask of a batch of theirs, bool
        """
        if not self._pool.placement.spread:
            return
        if self._mask_BT is None:
            self._mask_BT = mask_BT[: max(micro_batch_sizes(len(mask_BT), plan.m))].clone()
        for device, blocks in enumerate(plan.delta):
            # A device without an answer is slow to start, or gone.
            if not blocks and device not in self._answers and device not in self._pool.lost:
                self._answers[device] = self._pool.spare(device).try_block.remote(self._mask_BT)

    def times(self) -> dict[str, list[list[Any]]]:
        """Read the answers that are there: as ``tebs`` of ``round_times``."""
        times = {}
        for device in [d for d, answer in self._answers.items() if ray.wait([answer], timeout=0)[0]]:
            try:
                seen = ray.get(self._answers.pop(device))
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
                # It ended itself for want of work, or has no memory for a TEB: it is started anew with the next round.
                self._pool.forget_spare(device)
                continue
            self._pool.note_spare(device)
            if seen:
                times[str(device)] = medians(seen)
        return times
