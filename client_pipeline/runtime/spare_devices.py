"""Devices of a cluster that have no TEB: each tries one while the others train, so that a change of its speed is seen.

What a TEB takes here and what it takes in a pipeline need not be the same: what counts is by how much it changes from
round to round. Only machines of their own try: in a process that devices share, or on cores that they share, a trial
would slow down those that train.
"""

from __future__ import annotations

from typing import Any

import ray
from torch import Tensor

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.runtime.device_pool import DevicePool
from client_pipeline.runtime.round_times import medians


class SpareDevices:
    """Asks the devices without a TEB once in a round; none is waited for, and none that fails is missed.

    Parameters
    ----------
    pool : the cluster's devices
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._answers: dict[int, Any] = {}
        """What was asked and has not been read, by device."""
        self._mask_BT: Tensor | None = None

    def ask(self, plan: ClusterPlan, mask_BT: Tensor) -> None:
        """Let them try a micro-batch; always the first that was asked for, so that times differ by the device alone.

        Parameters
        ----------
        plan : the others'
        mask_BT : padding mask of a batch of theirs, bool
        """
        if not self._pool.is_spread:
            return
        if self._mask_BT is None:
            self._mask_BT = mask_BT[: max(micro_batch_sizes(len(mask_BT), plan.m))].clone()
        for device, blocks in enumerate(plan.delta):
            # Whoever has not answered yet is slow to start, or gone.
            if not blocks and device not in self._answers and device not in self._pool.lost:
                self._answers[device] = self._pool.spare(device).try_block.remote(self._mask_BT)

    def times(self) -> dict[str, list[list[Any]]]:
        """Read the answers that are there: as ``tebs`` of :func:`client_pipeline.runtime.round_times.round_times`."""
        times = {}
        for device in [d for d, answer in self._answers.items() if ray.wait([answer], timeout=0)[0]]:
            try:
                seen = ray.get(self._answers.pop(device))
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
                # It ended itself for want of work, or has no memory for a TEB: it is started anew with the next round.
                self._pool.forget_spare(device)
                continue
            if seen:
                times[str(device)] = medians(seen)
        return times
